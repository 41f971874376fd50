"""Engines on two GPUs, which sum in each other's memory or by NCCL: the tokens of PEFT, and the end of a rank."""

import pytest
import torch

from minivllm.parallel.peers.group import PeerGroup
from tests.worlds.adapters import ADAPTERS
from tests.worlds.engines import TinyWorld, greedy, run, tokens_of
from tests.worlds.processes import all_end, dies_in_a_step, group_is_left, kill_rank, rank_pids

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="not verified here: needs two GPUs that share memory"
)

EIGHT = {f"{name}-{number}": config for number in range(2) for name, config in ADAPTERS.items()}
OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "max_loras": 8,
    "max_cpu_loras": 8,
    "max_num_seqs": 32,
    "num_kv_blocks": 400,
    "warm_up": True,
}
KINDS = ("_sum", "_gather", "_norm")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return TinyWorld(tmp_path_factory.mktemp("two-gpus"), adapters=EIGHT, hidden_size=64)


def count_calls(monkeypatch):
    """How often rank 0 launches each kernel of peers' memory, norms with adapters apart."""
    calls = dict.fromkeys((*KINDS, "with adapters"), 0)

    def counted(kind, call):
        def count_and_call(group, *args):
            calls["with adapters" if kind == "_norm" and len(args) > 4 and args[4] is not None else kind] += 1
            return call(group, *args)

        return count_and_call

    for kind in KINDS:
        monkeypatch.setattr(PeerGroup, kind, counted(kind, getattr(PeerGroup, kind)))
    return calls


@pytest.mark.parametrize("by_nccl", [False, True, False], ids=["peers", "NCCL", "peers again"])
def test_tokens_of_base_and_eight_adapters_are_those_of_peft(world, monkeypatch, by_nccl):
    calls, pairs = count_calls(monkeypatch), world.workload()
    engine = world.engine(**OPTIONS, disable_custom_all_reduce=by_nccl)

    try:
        for number, (name, prompt) in enumerate(pairs):
            engine.add_request(str(number), prompt, greedy(12), lora_request=world.request(name))
        outputs = run(engine)
    finally:
        engine.executor.shutdown()

    for number, (name, prompt) in enumerate(pairs):
        assert tokens_of(outputs[str(number)]) == world.answer(name, prompt, 12), f"{number}: {name}"
    launched = {kind for kind, number in calls.items() if number}
    assert launched == (set() if by_nccl else calls.keys()), calls


def test_the_end_of_a_rank_ends_the_engine_though_another_waits_for_it_in_a_kernel(world):
    engine = world.engine(**OPTIONS)
    pids = rank_pids(engine)[1:]
    for number in range(4):
        engine.add_request(str(number), [5, 6, 7], greedy(200), lora_request=world.request("all-0"))
    for _ in range(6):
        engine.step()

    kill_rank(engine, 1)

    dies_in_a_step(engine, r"rank 1 of 2 has ended \(killed by signal 9\)")
    all_end(pids)
    group_is_left()
