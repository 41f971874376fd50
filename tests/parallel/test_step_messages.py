"""What a step's message tells the ranks that do not schedule, and what they make of it."""

import pickle
from types import SimpleNamespace

import pytest

from minivllm import LoRARequest, SamplingParams
from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.gpu.step_buffers import StepShape
from minivllm.gpu.step_graphs import StepGraphs
from minivllm.parallel.step_messages import StepReader, StepWriter
from tests.worlds.engines import greedy


@pytest.fixture
def ranks():
    """What is written goes through bytes, as in a pipe."""
    writer, reader = StepWriter(), StepReader()
    return lambda output: reader.read(pickle.loads(pickle.dumps(writer.write(output))))


def request(name, prompt, adapter_id=0, blocks=(), params=None):
    lora = LoRARequest(f"a{adapter_id}", adapter_id, "/somewhere") if adapter_id else None
    made = Request(name, list(prompt), params or greedy(), lora)
    made.block_ids = list(blocks)
    return made


def step(*rows):
    """Rows are (request, tokens, samples)."""
    scheduled = [ScheduledRequest(*row) for row in rows]
    tokens = sum(row[1] for row in rows)
    return SchedulerOutput(scheduled, running=[row[0] for row in rows], total_num_scheduled_tokens=tokens)


def seen(row):
    return row.request_id, row.adapter_id, row.num_computed_tokens, row.block_ids


def test_rows_have_tokens_places_blocks_and_adapters(ranks):
    base, adapted = request("b", range(20, 29), blocks=[4, 7, 2]), request("a", [5, 6], 3, [9])
    base.num_computed_tokens = 4

    output = ranks(step((base, 5, True), (adapted, 2, False)))

    rows = [entry.request for entry in output.scheduled]
    assert list(map(seen, rows)) == [("b", 0, 4, [4, 7, 2]), ("a", 3, 0, [9])]
    assert rows[0].all_token_ids[4:9] == [24, 25, 26, 27, 28] and rows[0].all_token_ids[6] == 26
    assert rows[1].all_token_ids[0:2] == [5, 6]
    assert rows[0].lora_request is None and rows[1].lora_request.lora_int_id == 3
    assert [entry[1:] for entry in output.scheduled] == [(5, True), (2, False)]
    assert output.total_num_scheduled_tokens == 7 and output.running == rows


def test_only_new_blocks_travel_and_the_list_stays_the_same(ranks):
    growing = request("g", range(8), blocks=[3, 1])
    first = ranks(step((growing, 8, True))).scheduled[0].request
    growing.num_computed_tokens = 8
    growing.append_output_token(50)
    growing.block_ids += [6, 5]
    writer = StepWriter()
    writer.write(step((growing, 1, True)))

    second = ranks(step((growing, 1, True))).scheduled[0].request

    # Step buffers know a row by its list of blocks, and read of that what is new.
    assert second.block_ids is first.block_ids and second.block_ids == [3, 1, 6, 5]
    assert second.all_token_ids[8] == 50
    assert writer.write(step((growing, 1, True))).new_blocks == [[]]  # all was told


def test_who_lost_its_blocks_or_sat_out_comes_with_all_of_them(ranks):
    preempted, idle, other = (request(name, range(6), blocks=[i, i + 1]) for i, name in enumerate("pio", 1))
    before = ranks(step((preempted, 6, True), (idle, 6, True))).scheduled[0].request
    preempted.block_ids = [8]
    ranks(step((other, 2, False)))

    rows = [e.request for e in ranks(step((preempted, 3, False), (idle, 1, True))).scheduled]

    assert [row.block_ids for row in rows] == [[8], [2, 3]]
    assert rows[0].block_ids is not before.block_ids


def test_a_request_that_wants_its_prompt_scored_travels_whole(ranks):
    params = SamplingParams(prompt_logprobs=2)
    scored = request("s", [7, 8, 9], blocks=[1], params=params)

    row = ranks(step((scored, 3, True))).scheduled[0].request

    assert row.wants_prompt_logprobs and row.prompt_token_ids == [7, 8, 9]
    assert row.sampling_params.prompt_logprobs == 2 and row.block_ids == [1]


def test_stand_ins_travel_as_they_are(ranks):
    ahead = request("a", [4, 5], blocks=[1])
    ahead.num_computed_tokens = 2
    ahead.append_output_token(-3)  # stands for a token that is not there yet, of a step under way

    row = ranks(step((ahead, 1, True))).scheduled[0].request

    assert row.all_token_ids[row.num_computed_tokens] == -3


@pytest.mark.parametrize(("params", "size"), [(greedy(), 32), (SamplingParams(prompt_logprobs=1), 0)])
def test_all_ranks_find_the_same_graph_for_a_step_with_a_prompt(ranks, params, size):
    output = step((request("a", range(9), params=params), 9, True), (request("b", [7], blocks=[1]), 1, True))
    graphs = SimpleNamespace(decodes=[], mixed=[StepShape(32, 6, 16)])

    found = [StepGraphs.find(graphs, one) for one in (ranks(output), output)]

    assert [graph.shape.tokens if graph else 0 for graph in found] == [size, size]
