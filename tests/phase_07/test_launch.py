"""What one forward pass is given, and what is made of what it gives (lab 7.3): a model that only takes notes."""

from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hand_made_steps import lora, make_output, make_request
from torch import nn

import minivllm.worker.model_runner as model_runner
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.model_runner import NO_GRAPHS, Graphs, ModelRunner
from minivllm.worker.row_sampler import PendingStep
from tests.oracles.rows import assert_rows_equal
from tests.worlds.small import SmallWorld

pytestmark = pytest.mark.lab("7.3")


class NotingModel(nn.Module):
    """Its hidden state of a token is (token id, position); its logits are hidden states.

    Whatever else it is asked for is a real model's.
    """

    def __init__(self, log, real):
        super().__init__()
        self.log, self.real = log, real

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def forward(self, input_ids, positions, attn):
        self.log.append("forward")
        assert len(input_ids) == len(positions), f"{len(input_ids)} token ids, {len(positions)} positions"
        self.input_ids, self.positions, self.attn = input_ids, positions, attn
        return torch.stack([input_ids, positions], dim=1).double()  # (T, 2)

    def compute_logits(self, hidden_states):
        self.log.append(f"logits of {len(hidden_states)}")
        return hidden_states


class NotingGraphs(Graphs):
    """One captured step, of decodes; it computes nothing."""

    def __init__(self, log):
        self.log = log

    def find(self, output):
        return self if output.only_decodes else None

    def padded(self, batch):
        requests = [*batch.requests, make_request("padding", [0])]
        one = np.ones(1, dtype=np.int64)
        return InputBatch(
            requests,
            np.append(batch.num_scheduled_tokens, one),
            np.append(batch.num_sampled_tokens, one),
        )

    def run(self, batch):
        self.log.append(f"replay {batch.req_ids}")
        return PendingStep(batch.requests, torch.zeros(len(batch.requests) + 1, 2))


class Runner(ModelRunner):
    """An engine's runner but for its model, which takes notes, and its adapters, which are not loaded.

    log       what happened, in order
    batches   of each activation: request ids, tokens and samples
    """

    def __init__(self, *, with_lora=True, with_graphs=False):
        vars(self).update(vars(self.real))
        self.log, self.batches = [], []
        self.model = NotingModel(self.log, self.real.model)
        self.graphs = NotingGraphs(self.log) if with_graphs else NO_GRAPHS
        self.worker_manager = copy(self.real.worker_manager) if with_lora else None
        # The real one is an attribute, which would hide the method below.
        del self.build_attention

    def set_active_loras(self, input_batch, num_scheduled_tokens, num_sampled_tokens=None):
        self.log.append("adapters")
        self.batches.append((input_batch.req_ids, list(num_scheduled_tokens), list(num_sampled_tokens)))

    def build_attention(self, query_lens, seq_lens, block_tables):
        return SimpleNamespace(query_lens=query_lens, seq_lens=seq_lens, block_tables=block_tables)


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    """Whose runner all of them are but for what they note."""
    engine = SmallWorld(tmp_path_factory.mktemp("model")).engine()
    Runner.real = engine.runner
    return engine


def request(name, adapter_id, prompt, *, computed=0, answer=()):
    """A request of whose tokens so many are computed; its blocks are 100 times the adapter's id and on."""
    made = make_request(name, prompt, lora(adapter_id) if adapter_id else None, [100 * adapter_id + 1])
    for token in answer:
        made.append_output_token(token)
    made.num_computed_tokens = computed
    return made


@pytest.fixture
def mixed():
    """A whole prompt of base, a chunk in mid-prompt of adapter 1, a decode of adapter 2; admitted in another order."""
    decode = request("decode", 2, [20, 21, 22], computed=4, answer=[23, 24])
    chunk = request("chunk", 1, [10, 11, 12, 13, 14, 15, 16], computed=2)
    prompt = request("prompt", 0, [1, 2, 3])
    return make_output((decode, 1), (chunk, 3), (prompt, 3))


OWNERS = ["prompt of base"] * 3 + ["chunk of adapter 1"] * 3 + ["decode of adapter 2"]


def what_the_model_got(output):
    """The noting model after a step: `input_ids`, `positions` and `attn`."""
    runner = Runner()
    runner.launch_model(output)
    assert "forward" in runner.log, "the model was not run"
    return runner.model


def test_every_row_brings_the_tokens_that_are_not_computed_and_goes_on_where_it_stopped(mixed):
    model = what_the_model_got(mixed)

    assert_rows_equal(model.input_ids, [1, 2, 3, 12, 13, 14, 24], labels=OWNERS, what="input_ids")
    assert_rows_equal(model.positions, [0, 1, 2, 2, 3, 4, 4], labels=OWNERS, what="positions")
    assert (model.input_ids.dtype, model.positions.dtype) == (torch.int64, torch.int64), "both are indices"


def test_who_comes_back_brings_prompt_and_answer_in_one_chunk():
    """A request that was preempted computes its answer again, too."""
    back = request("back", 1, [10, 11, 12], computed=1, answer=[13, 14, 15])

    model = what_the_model_got(make_output((back, 4)))

    assert model.input_ids.tolist() == [11, 12, 13, 14], "2 tokens of the prompt and 2 of the answer"
    assert model.positions.tolist() == [1, 2, 3, 4]


def test_the_pass_advances_no_request(mixed):
    """The scheduler counts tokens as computed once the step is through; a step that fails counts for nothing."""
    Runner().launch_model(mixed)

    computed = {entry.request.request_id: entry.request.num_computed_tokens for entry in mixed.scheduled}
    assert computed == {"decode": 4, "chunk": 2, "prompt": 0}, "`num_computed_tokens` as before the pass"


def test_attention_sees_the_whole_context_of_each_row(mixed):
    attn = what_the_model_got(mixed).attn

    assert list(attn.query_lens) == [3, 3, 1], "new tokens of prompt, chunk and decode"
    assert list(attn.seq_lens) == [3, 5, 5], "contexts of prompt, chunk and decode, new tokens included"
    assert list(attn.block_tables) == [[1], [101], [201]], "blocks of prompt, chunk and decode"


def test_logits_are_those_of_the_last_token_of_each_row_that_samples(mixed):
    step = Runner().launch_model(mixed)

    assert [r.request_id for r in step.requests] == ["prompt", "decode"], "the chunk does not sample"
    labels = ["prompt of base", "decode of adapter 2"]
    assert_rows_equal(
        step.logits[:, 0], [3.0, 24.0], labels=labels, what="the token that logits are computed of"
    )


def test_the_requests_are_in_the_order_of_their_logits():
    """The scheduler admitted adapter 3 first; in the batch it comes last."""
    requests = [request(f"of {a}", a, [10 * a + 1, 10 * a + 2]) for a in (3, 0, 2)]

    step = Runner().launch_model(make_output(*((r, 2) for r in requests)))

    whose = {r.request_id: int(logits[0]) for r, logits in zip(step.requests, step.logits)}
    assert whose == {"of 0": 2, "of 2": 22, "of 3": 32}, "request -> the token whose logits it is given"


def test_a_running_request_without_tokens_is_no_row_of_the_pass():
    idle, busy = request("idle", 1, [5, 6, 7], computed=3, answer=[8]), request("busy", 2, [1, 2, 3])

    model = what_the_model_got(make_output((busy, 3), idle=[idle]))

    assert model.input_ids.tolist() == [1, 2, 3], "the idle request has no token in this step"
    assert list(model.attn.query_lens) == [3]


def test_no_logits_are_computed_when_nobody_samples():
    runner = Runner()

    step = runner.launch_model(make_output((request("chunk", 1, [1, 2, 3, 4]), 2)))

    assert (step.requests, step.logits) == ([], None)
    assert runner.log == ["adapters", "forward"], "the chunk fills the cache all the same"


def test_prompts_are_scored_by_the_hidden_states_of_all_rows(mixed, monkeypatch):
    """For whoever asked for logprobs of the prompt, a chunk that does not sample among them."""
    scored = []
    monkeypatch.setattr(model_runner, "score_prompts", lambda *given: scored.append(given))
    runner = Runner()

    runner.launch_model(mixed)

    [(by, batch, hidden_states)] = scored
    assert by is runner and batch.req_ids == ["prompt", "chunk", "decode"]
    assert len(hidden_states) == 7, "one hidden state a token"


def test_prompts_are_scored_in_a_step_that_samples_nothing(monkeypatch):
    """A prompt of 9 tokens and a budget of 4: its first 8 logprobs come from chunks that sample nothing."""
    scored = []
    monkeypatch.setattr(model_runner, "score_prompts", lambda *given: scored.append(given[1:]))
    chunk = make_request("chunk", range(10, 19), lora(1), [101], prompt_logprobs=1)

    step = Runner().launch_model(make_output((chunk, 4)))

    assert (step.requests, step.logits) == ([], None)
    assert len(scored) == 1, "score_prompts is called for a chunk, too"
    [(batch, hidden_states)] = scored
    assert batch.req_ids == ["chunk"]
    assert hidden_states[:, 0].tolist() == [10, 11, 12, 13], "hidden states of the chunk's tokens"


def test_adapters_are_in_their_slots_before_the_pass(mixed):
    runner = Runner()

    runner.launch_model(mixed)

    assert runner.log == ["adapters", "forward", "logits of 2"], (
        "prompt and decode sample, the chunk does not"
    )
    assert runner.batches == [(["prompt", "chunk", "decode"], [3, 3, 1], [1, 0, 1])], (
        "no graph runs it, so nothing is padded"
    )


def test_a_batch_of_base_rows_makes_its_adapters_active_too():
    """None: else the rows of the last step would stay."""
    runner = Runner()

    runner.launch_model(make_output((request("base", 0, [1, 2]), 2)))

    assert runner.log[:2] == ["adapters", "forward"]


def test_without_lora_there_is_nothing_to_activate():
    runner = Runner(with_lora=False)

    runner.launch_model(make_output((request("base", 0, [1, 2]), 2)))

    assert runner.log[:1] == ["forward"]


def test_decodes_are_replayed_with_their_adapters_padded_to_the_graph():
    runner = Runner(with_graphs=True)
    requests = [request(f"of {a}", a, [1, 2], computed=2, answer=[7]) for a in (2, 0)]

    step = runner.launch_model(make_output(*((r, 1) for r in requests)))

    assert runner.log == ["adapters", "replay ['of 0', 'of 2']"], "the graph pads its inputs itself"
    assert runner.batches == [(["of 0", "of 2", "padding"], [1, 1, 1], [1, 1, 1])], (
        "two rows in a graph of three"
    )
    assert [r.request_id for r in step.requests] == ["of 0", "of 2"]


def test_base_rows_alone_are_made_active_too_before_a_graph_runs():
    """The graph is told by the backend whether the batch has adapters, and it has those of the last step until then."""
    runner = Runner(with_graphs=True)

    runner.launch_model(make_output((request("base", 0, [1, 2], computed=2, answer=[7]), 1)))

    assert runner.log == ["adapters", "replay ['base']"]


def test_a_batch_with_a_prompt_is_not_replayed(mixed):
    runner = Runner(with_graphs=True)

    runner.launch_model(mixed)

    assert runner.log[:2] == ["adapters", "forward"]
