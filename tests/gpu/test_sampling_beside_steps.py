"""Rows that want more than the likeliest token are sampled on a GPU while its next step is being prepared."""

import torch

from minivllm import SamplingParams
from minivllm.layers.penalties import TokenHistory
from minivllm.layers.sampler import Sampler, make_generator
from tests.tools.device import needs_cuda
from tests.worlds.ahead import WISHES
from tests.worlds.engines import run, tokens_of
from tests.worlds.models import token_ids


def sampled(logits, masks):
    rows = [SamplingParams(**{"max_tokens": 4} | wish) for wish in WISHES.values()]
    generators = [make_generator(params) for params in rows]
    histories = [TokenHistory([1, 2, 3], [4, 4, 5]) for _ in rows]
    return Sampler([2])(logits, rows, generators, [3] * len(rows), histories, masks)


@needs_cuda
def test_the_host_waits_for_nothing_until_it_reads_the_tokens():
    logits = torch.randn(len(WISHES), 997, generator=torch.Generator().manual_seed(1))
    masks = [torch.arange(997) % 3 == 1, *[None] * (len(WISHES) - 1)]
    expected = sampled(logits, masks)
    there = logits.cuda()
    sampled(there, masks)  # what the first calls of kernels do is not asked

    torch.cuda.set_sync_debug_mode("error")
    try:
        output = sampled(there, masks)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert output.token_ids.tolist() == expected.token_ids.tolist()
    for row, other in zip(output.logprobs, expected.logprobs, strict=True):
        assert (row is None) == (other is None)
        if row is not None:
            assert list(row) == list(other)
            assert [p.rank for p in row.values()] == [p.rank for p in other.values()]


@needs_cuda
def test_a_step_ahead_changes_no_token_of_theirs(world):
    answers = []
    for async_scheduling in (False, True):
        engine = world.engine(
            device="cuda", dtype="bfloat16", max_loras=2, warm_up=True, async_scheduling=async_scheduling
        )
        for i, (name, wish) in enumerate(WISHES.items()):
            params = SamplingParams(**{"max_tokens": 5 + i % 4, "ignore_eos": True} | wish)
            adapter = [None, *world.names][i % 4]
            engine.add_request(name, token_ids(3 + i, i), params, lora_request=world.request(adapter))
        answers.append({name: tokens_of(output) for name, output in run(engine).items()})

    assert answers[0] == answers[1]
