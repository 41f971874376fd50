"""Which adapter every token and every sampled row has (lab 7.1)."""

import random

import numpy as np
import pytest
from hand_made_steps import lora, make_output, make_request

from minivllm.lora.request import LoRARequest
from minivllm.worker.input_batch import InputBatch

lab = pytest.mark.lab("7.1")


def batch_of(*adapter_ids):
    """One request for each id, 0 = base, in this order."""
    requests = [make_request(f"r{i}", [1, 2, 3], lora(a) if a else None) for i, a in enumerate(adapter_ids)]
    zeros = np.zeros(len(requests), dtype=np.int64)
    return InputBatch(requests, zeros, zeros)


# The adapters of the requests, their tokens and their samples; whose these are, samples first; who is used.
MAPPED = {
    "each computes its own number": ([0, 5, 2], [2, 1, 3], [1, 1, 1], (0, 5, 2), (0, 0, 5, 2, 2, 2), {5, 2}),
    "one that samples three": ([3, 4], [3, 3], [3, 1], (3, 3, 3, 4), (3, 3, 3, 4, 4, 4), {3, 4}),
    "base rows alone": ([0, 0], [2, 1], [1, 1], (0, 0), (0, 0, 0), set()),
    "one adapter of many rows": ([4, 4, 4], [1, 1, 1], [1, 1, 1], (4, 4, 4), (4, 4, 4), {4}),
}


@lab
@pytest.mark.parametrize("case", MAPPED)
def test_every_token_and_every_sampled_row_has_its_requests_adapter(case):
    adapter_ids, scheduled, sampled, *expected = MAPPED[case]

    prompts, tokens, loras = batch_of(*adapter_ids).make_lora_inputs(np.array(scheduled), np.array(sampled))

    told = f"adapters {adapter_ids} compute {scheduled} tokens and sample {sampled}"
    assert tokens == expected[1], f"{told}: whose the tokens are"
    assert prompts == expected[0], f"{told}: whose the sampled rows are"
    assert loras == {lora(a) for a in expected[2]}, f"{told}: who must be in a slot"


@lab
def test_a_row_that_does_not_sample_is_in_no_prompt_mapping():
    batch = batch_of(3, 4, 5)

    prompts, tokens, _ = batch.make_lora_inputs(np.array([2, 6, 1]), np.array([1, 0, 1]))

    assert tokens == (3, 3, 4, 4, 4, 4, 4, 4, 5), "adapters 3, 4 and 5 compute 2, 6 and 1 tokens"
    assert prompts == (3, 5), "the row of adapter 4 is a chunk that does not sample"


@lab
def test_the_adapter_of_a_row_without_tokens_must_stay_too():
    batch = batch_of(2, 9, 0)

    prompts, tokens, loras = batch.make_lora_inputs(np.array([1, 0, 1]), np.array([1, 0, 1]))

    assert loras == {lora(2), lora(9)}, "adapter 9 has no tokens in this step, but its request runs"
    assert (prompts, tokens) == ((2, 0), (2, 0))


@lab
@pytest.mark.parametrize("others", [(1, 2**32 + 1), (2**24, 2**24 + 1), (2**53, 2**53 + 1), (5, 2**63 - 1)])
def test_ids_may_be_as_large_as_a_request_may_have_them(others):
    """Two of them are one in 32 bits, or as a float: one tenant would be served another's answers."""
    batch = batch_of(*others, 0)

    prompts, tokens, loras = batch.make_lora_inputs(np.array([1, 2, 1]), np.array([1, 1, 1]))

    first, second = others
    assert (prompts, tokens) == ((first, second, 0), (first, second, second, 0))
    assert {request.lora_int_id for request in loras} == {first, second}


@lab
def test_an_adapter_under_two_names_is_asked_for_once():
    """The same id and path under another name is an alias."""
    requests = [
        make_request(name, [1, 2], LoRARequest(name, 4, "/adapters/4")) for name in ("sql", "sql-latest")
    ]
    zeros = np.zeros(2, dtype=np.int64)

    _, _, loras = InputBatch(requests, zeros, zeros).make_lora_inputs(np.array([1, 1]), np.array([1, 1]))

    assert [request.lora_int_id for request in loras] == [4], f"one adapter, asked for as {loras}"


@lab
def test_the_mappings_can_be_the_key_of_a_memo():
    batch = batch_of(2, 0)

    first = batch.make_lora_inputs(np.array([1, 2]), np.array([1, 1]))[:2]
    again = batch.make_lora_inputs(np.array([1, 2]), np.array([1, 1]))[:2]

    assert hash(first) == hash(again)
    assert all(type(adapter_id) is int for mapping in first for adapter_id in mapping)


@lab
@pytest.mark.parametrize("seed", range(5))
def test_any_batch_is_mapped_as_one_would_by_hand(seed):
    rng = random.Random(seed)
    adapter_ids = [rng.choice([0, 1, 2, 90]) for _ in range(rng.randint(1, 12))]
    scheduled = [rng.randint(0, 5) for _ in adapter_ids]
    sampled = [rng.randint(0, 1) if n else 0 for n in scheduled]
    batch = batch_of(*adapter_ids)

    prompts, tokens, loras = batch.make_lora_inputs(np.array(scheduled), np.array(sampled))

    assert list(tokens) == [a for a, n in zip(adapter_ids, scheduled) for _ in range(n)]
    assert list(prompts) == [a for a, n in zip(adapter_ids, sampled) for _ in range(n)]
    assert {request.lora_int_id for request in loras} == set(adapter_ids) - {0}


@lab
def test_rows_are_ordered_by_adapter_with_base_first_so_that_a_run_is_an_adapter():
    requests = [
        make_request(name, [1, 2], lora(a) if a else None) for name, a in zip("fedcba", [7, 0, 3, 7, 0, 3])
    ]

    batch = InputBatch.from_scheduler_output(make_output(*((request, 2) for request in requests)))

    assert [request.adapter_id for request in batch.requests] == [0, 0, 3, 3, 7, 7]
    assert batch.req_ids == ["e", "b", "d", "a", "f", "c"], "of one adapter in the scheduler's order"


@lab
def test_every_row_keeps_its_own_tokens_and_samples_only_if_they_reach_the_end():
    requests = [make_request(f"of {a}", [1] * 9, lora(a) if a else None) for a in (7, 0, 3)]
    steps = dict(zip(["of 7", "of 0", "of 3"], [9, 2, 1]))

    batch = InputBatch.from_scheduler_output(make_output(*((r, steps[r.request_id]) for r in requests)))

    assert dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist())) == steps
    assert dict(zip(batch.req_ids, batch.num_sampled_tokens.tolist())) == {"of 7": 1, "of 0": 0, "of 3": 0}
    dtypes = batch.num_scheduled_tokens.dtype, batch.num_sampled_tokens.dtype
    assert dtypes == (np.int64, np.int64), "counts are whole numbers, who samples is not true and false"


@lab
def test_a_running_request_without_tokens_is_a_row_although_its_adapter_has_another_with_tokens():
    busy, idle = make_request("busy", [1, 2, 3], lora(1)), make_request("idle", [1, 2, 3], lora(1))
    base, idle_base = make_request("base", [1, 2]), make_request("idle base", [1, 2])

    batch = InputBatch.from_scheduler_output(make_output((busy, 3), (base, 1), idle=[idle, idle_base]))

    rows = dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist()))
    assert rows == {"base": 1, "idle base": 0, "busy": 3, "idle": 0}, "request -> its tokens in this step"
    samples = dict(zip(batch.req_ids, batch.num_sampled_tokens.tolist()))
    assert samples == {"base": 0, "idle base": 0, "busy": 1, "idle": 0}, "request -> its samples in this step"


@lab
def test_rows_of_one_adapter_without_tokens_keep_their_place_behind_those_with_some():
    """The scheduler gives tokens in the order of `running`, so those that the budget did not reach are its last."""
    names = ["b0", "a0", "b1", "a1"]
    requests = [make_request(name, [1, 2], lora({"a": 3, "b": 5}[name[0]])) for name in names]

    batch = InputBatch.from_scheduler_output(make_output(*((r, 2) for r in requests[:2]), idle=requests[2:]))

    assert batch.req_ids == ["a0", "a1", "b0", "b1"], "of adapters 3 and 5, each in the scheduler's order"
    assert batch.num_scheduled_tokens.tolist() == [2, 0, 2, 0]


@lab
def test_the_schedulers_own_lists_stay_as_they_are():
    busy, idle = make_request("busy", [1, 2], lora(4)), make_request("idle", [1], lora(2))
    output = make_output((busy, 2), idle=[idle])

    InputBatch.from_scheduler_output(output)

    assert [entry.request for entry in output.scheduled] == [busy], "who has tokens in this step"
    assert output.running == [busy, idle]
