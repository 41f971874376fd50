"""Broadcast of a step (lab 11.4). The oracle: the scheduler's own requests, beside what a follower makes of bytes."""

import pickle
import random

import pytest

from minivllm import LoRARequest, SamplingParams
from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.parallel.step_messages import StepReader, StepWriter

pytestmark = pytest.mark.lab("11.4")


class Ranks:
    """One that schedules, and one that follows. Bytes are between them, as in a pipe.

    sent   of each step, the messages' bytes
    """

    def __init__(self):
        self.writer, self.reader, self.sent = StepWriter(), StepReader(), []

    def message(self, *rows):
        self.sent.append(pickle.dumps(self.writer.write(step(*rows))))
        return pickle.loads(self.sent[-1])

    def read(self, *rows):
        return self.reader.read(self.message(*rows))


def step(*rows):
    """Rows are (request, tokens, whether the next one is sampled)."""
    scheduled = [ScheduledRequest(*row) for row in rows]
    return SchedulerOutput(
        scheduled, running=[row[0] for row in rows], total_num_scheduled_tokens=sum(row[1] for row in rows)
    )


def request(name, prompt, adapter_id=0, blocks=(), **params):
    lora = LoRARequest(f"a{adapter_id}", adapter_id, "/somewhere") if adapter_id else None
    made = Request(name, list(prompt), SamplingParams(temperature=0.0, **params), lora)
    made.block_ids = list(blocks)
    return made


def assert_same(output, *rows):
    """A model runner can ask the follower's rows what it can ask the scheduler's, and hears the same."""
    assert output.running == [entry.request for entry in output.scheduled]
    assert [entry[1:] for entry in output.scheduled] == [(tokens, samples) for _, tokens, samples in rows]
    assert output.total_num_scheduled_tokens == sum(tokens for _, tokens, _ in rows)
    for entry, (wanted, tokens, _) in zip(output.scheduled, rows, strict=True):
        row, start = entry.request, wanted.num_computed_tokens
        assert (row.request_id, row.adapter_id) == (wanted.request_id, wanted.adapter_id)
        assert (row.num_computed_tokens, row.block_ids) == (start, wanted.block_ids)
        assert row.all_token_ids[start : start + tokens] == wanted.all_token_ids[start : start + tokens]
        assert (row.lora_request is None) == (wanted.adapter_id == 0)
        if wanted.adapter_id:
            assert row.lora_request.lora_int_id == wanted.adapter_id


def test_a_follower_hears_of_every_row_what_the_scheduler_knows():
    base, adapted = request("b", range(20, 29), blocks=[4, 7, 2]), request("a", [5, 6], 3, [9])
    base.num_computed_tokens = 4
    rows = (base, 3, False), (adapted, 2, True)

    output = Ranks().read(*rows)

    assert_same(output, *rows)


def test_no_token_travels_but_those_of_the_step():
    long = request("l", range(100, 200), blocks=[1, 2, 3])
    long.num_computed_tokens = 60

    message = Ranks().message((long, 8, False))

    assert message.token_ids == [list(range(160, 168))]
    assert message.starts == [60]


def test_blocks_that_are_known_do_not_travel_again():
    ranks, growing = Ranks(), request("g", range(8), blocks=[3, 1])
    ranks.read((growing, 4, False))
    growing.block_ids += [6, 5]

    message = ranks.message((growing, 4, True))

    assert (message.held, message.new_blocks) == ([2], [[6, 5]])
    assert ranks.message((growing, 4, True)).new_blocks == [[]]


def test_a_message_stays_as_it_was_written():
    """It may be sent while the scheduler plans the next step already, and gives a request its next blocks."""
    writer, growing = StepWriter(), request("g", range(8), blocks=[3, 1])
    message = writer.write(step((growing, 8, True)))

    growing.block_ids += [6, 5]
    growing.append_output_token(400)

    assert (message.new_blocks, message.token_ids) == ([[3, 1]], [list(range(8))])
    assert writer.write(step((growing, 1, True))).new_blocks == [[6, 5]]


def test_a_decode_step_of_a_long_request_is_a_small_message():
    """2,000 blocks would be 4 KB and more."""
    ranks = Ranks()
    long = request("l", range(32), blocks=range(2000))
    ranks.read((long, 32, True))

    ranks.read((long, 1, True))

    assert len(ranks.sent[0]) > 4000
    assert len(ranks.sent[1]) < 400


def test_a_list_of_blocks_grows_on_the_follower_too():
    """Who keeps a list of a row's blocks from step to step sees the same one, longer."""
    ranks, growing = Ranks(), request("g", range(8), blocks=[3])
    first = ranks.read((growing, 8, True)).scheduled[0].request
    growing.block_ids.append(6)

    second = ranks.read((growing, 1, True)).scheduled[0].request

    assert second.block_ids is first.block_ids
    assert second.block_ids == [3, 6]


def test_who_has_lost_its_blocks_comes_with_all_of_the_new_ones():
    ranks, preempted = Ranks(), request("p", range(6), blocks=[1, 2])
    before = ranks.read((preempted, 6, True)).scheduled[0].request
    preempted.block_ids = [8, 9, 4]

    after = ranks.read((preempted, 6, True)).scheduled[0].request

    assert after.block_ids == [8, 9, 4]
    assert after.block_ids is not before.block_ids
    assert before.block_ids == [1, 2]


def test_who_sat_out_a_step_comes_with_all_of_its_blocks():
    ranks = Ranks()
    idle, other = request("i", range(6), blocks=[1, 2]), request("o", range(6), blocks=[5])
    ranks.read((idle, 3, False), (other, 3, False))
    ranks.read((other, 1, True))

    rows = (other, 1, True), (idle, 3, True)
    message = ranks.message(*rows)

    assert (message.held, message.new_blocks) == ([1, 0], [[], [1, 2]])
    assert_same(ranks.reader.read(message), *rows)


def test_the_next_request_of_a_name_finds_nothing_of_the_last():
    ranks = Ranks()
    ranks.read((request("r", range(6), blocks=[1, 2]), 6, True))
    again = request("r", range(6), blocks=[1, 2])

    assert_same(ranks.read((again, 6, True)), (again, 6, True))


def test_a_request_that_wants_its_prompt_scored_travels_whole_and_others_do_not():
    scored, plain = request("s", [7, 8, 9], blocks=[1], prompt_logprobs=2), request("p", [4, 5], 1, [3])

    first, second = (e.request for e in Ranks().read((plain, 2, True), (scored, 3, True)).scheduled)

    assert isinstance(second, Request) and second.prompt_token_ids == [7, 8, 9]
    assert not isinstance(first, Request) and first.wants_prompt_logprobs is False


def test_a_prompt_that_is_scored_in_several_steps_travels_whole_until_it_is():
    """A decode step of a request that had its prompt scored is as small as any other."""
    ranks, scored = Ranks(), request("s", range(500, 532), blocks=[1], prompt_logprobs=2)
    first = ranks.read((scored, 16, False)).scheduled[0].request
    scored.num_computed_tokens, scored.prompt_logprobs = 16, [None] * 16
    message = ranks.message((scored, 16, True))
    second = ranks.reader.read(message).scheduled[0].request
    scored.num_computed_tokens, scored.prompt_logprobs = 31, [None] * 32

    assert isinstance(first, Request) and isinstance(second, Request)
    assert message.whole.keys() == {0}
    assert ranks.message((scored, 1, True)).whole == {}


def test_neither_side_keeps_anything_of_requests_that_are_gone():
    ranks, last = Ranks(), request("z", range(4), blocks=[1])
    ranks.read((last, 4, True))
    sizes = len(pickle.dumps(ranks.reader)), len(pickle.dumps(ranks.writer))

    ranks.read(*((request(f"gone {n}", range(4), blocks=range(50)), 4, True) for n in range(20)))
    ranks.read((last, 4, True))

    assert (len(pickle.dumps(ranks.reader)), len(pickle.dumps(ranks.writer))) == sizes


def test_a_step_without_rows_is_one():
    assert_same(Ranks().read())


@pytest.mark.parametrize("seed", range(5))
def test_many_steps_with_requests_that_come_grow_wait_lose_blocks_and_end(seed):
    rng, ranks = random.Random(seed), Ranks()
    alive, made = [], 0
    for _ in range(60):
        while len(alive) < 5:
            made += 1
            prompt = rng.choices(range(500), k=rng.randint(2, 40))
            alive.append(request(f"r{made % 7}-{made}", prompt, rng.randrange(4), [rng.randrange(900)]))
        rows = []
        for one in rng.sample(alive, rng.randint(1, 5)):
            tokens = rng.randint(1, one.num_tokens - one.num_computed_tokens)
            if rng.random() < 0.1:
                one.block_ids = [rng.randrange(900)]
            one.block_ids += rng.choices(range(900), k=rng.randrange(3))
            rows.append((one, tokens, one.num_computed_tokens + tokens == one.num_tokens))

        assert_same(ranks.read(*rows), *rows)

        for one, tokens, samples in rows:
            one.num_computed_tokens += tokens
            if samples:
                one.append_output_token(rng.randrange(500))
        alive = [one for one in alive if one.num_output_tokens < 6]
