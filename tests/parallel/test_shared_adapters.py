"""Adapters on a model that processes share: each request gets what transformers and PEFT give it alone."""

import itertools

import pytest
import torch

from tests.worlds.engines import TinyWorld
from tests.worlds.experts import MIXTRAL, QWEN, sparse_world
from tests.worlds.models import token_ids
from tests.worlds.ranks import assert_shared_engines_answer, engines_in_lockstep, serve
from tests.worlds.tokens import TokenSet

LINEARS = {
    "qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 6,
        "lora_alpha": 7,
        "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"o_proj": 2, "layers.1.self_attn.k_proj": 12},
        "lora_bias": True,
    },
}
ENDS = {
    "embed": {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens"]},
    "head": {"r": 6, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "both": {"r": 5, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]},
}
FUSED = {
    "fused": {"r": 4, "lora_alpha": 9, "target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True},
    "fused, everything": {"r": 6, "lora_alpha": 5, "target_modules": "all-linear"},
}
WORLDS = {
    "llama-llama3-rope": LINEARS | ENDS,
    "llama-linear-rope-biases-tied": LINEARS | ENDS,
    "mistral-one-kv-head": LINEARS,
    "qwen3-wide-heads": LINEARS,
    "phi3-fused": FUSED,
}
OPTIONS = {"max_loras": 3, "max_cpu_loras": 6, "bias_enabled": True}
# Backend and whether adapters are fully sharded. Kernels go through an interpreter here, which takes its time.
BACKENDS = [
    ("loops", True),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            ("triton", False),
            ("triton", True),
            ("paged", False),
            ("paged", True),
        )
    ),
]
# What is tried every time; the rest at night.
OFTEN = {("llama-llama3-rope", 2, False), ("llama-llama3-rope", 4, True), ("phi3-fused", 2, True)}

_worlds = {}


@pytest.fixture
def world_of(tmp_path_factory):
    def world_of(variant):
        if variant not in _worlds:
            _worlds[variant] = TinyWorld(tmp_path_factory.mktemp("shared"), variant, WORLDS[variant])
        return _worlds[variant]

    return world_of


def every_case():
    for case in itertools.product(WORLDS, (2, 4), (False, True)):
        yield pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.nightly)


@pytest.mark.parametrize(("variant", "size", "fully"), list(every_case()))
def test_a_mixed_batch_gives_each_request_what_peft_gives_it(world_of, variant, size, fully, monkeypatch):
    world, options = world_of(variant), {**OPTIONS, "fully_sharded_loras": fully}

    assert_shared_engines_answer(monkeypatch, world, size, world.workload(rows=2), **options)


@pytest.mark.parametrize(("backend", "fully"), BACKENDS)
def test_every_backend_gives_it(world_of, backend, fully, monkeypatch):
    """Pages know no float64."""
    world = world_of("llama-llama3-rope")
    options = {**OPTIONS, "punica_backend": backend, "fully_sharded_loras": fully}
    options["dtype"] = "float32" if backend == "paged" else "float64"

    assert_shared_engines_answer(monkeypatch, world, 2, world.workload(rows=2)[:7], 3, **options)


@pytest.mark.parametrize(
    "variant", ["llama-llama3-rope", pytest.param("qwen2-tied", marks=pytest.mark.nightly)]
)
def test_tokens_that_adapters_add_are_read_and_produced(variant, tmp_path, monkeypatch):
    world = TokenSet(tmp_path, variant)
    names = ["cats", "wide ends", "narrow ends", "plain"]

    pairs = [(name, prompt) for name, prompt in world.workload() if name is None or name in names]
    assert_shared_engines_answer(
        monkeypatch, world, 2, pairs, max_loras=2, max_cpu_loras=6, lora_extra_vocab_size=4
    )


@pytest.mark.parametrize("variant", [MIXTRAL, pytest.param(QWEN, marks=pytest.mark.nightly)])
def test_experts_have_their_adapters(variant, tmp_path_factory, monkeypatch):
    world = sparse_world(tmp_path_factory, variant)

    assert_shared_engines_answer(
        monkeypatch,
        world,
        2,
        world.workload(rows=2, adapters=world.names[::2]),
        max_loras=3,
        max_cpu_loras=20,
    )


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "qkv_proj"]])
def test_layers_that_the_server_leaves_alone_are_summed_all_the_same(world_of, targets, monkeypatch):
    world = world_of("llama-llama3-rope")
    options = {**OPTIONS, "target_modules": targets}

    assert_shared_engines_answer(monkeypatch, world, 2, world.workload(rows=2, adapters=["qv"]), **options)


@pytest.mark.parametrize("variant", ["llama-llama3-rope", MIXTRAL])
def test_adapters_cost_no_further_meeting_of_processes(world_of, variant, tmp_path_factory, monkeypatch):
    world = sparse_world(tmp_path_factory, MIXTRAL) if variant == MIXTRAL else world_of(variant)

    def meetings(name):
        def work(tp):
            engine = world.engine(max_loras=1)
            tp.calls.clear()
            serve(engine, world, [(name, token_ids(5, 0))], 3)
            return tp.calls

        return engines_in_lockstep(monkeypatch, 2, work)

    assert meetings(world.names[0]) == meetings(None)


def test_fully_sharded_processes_meet_once_more_a_linear_over_rank_sized_rows(world_of, monkeypatch):
    world, tokens, rank = world_of("llama-llama3-rope"), 5, 6

    def work(tp):
        engine = world.engine(max_loras=1, max_lora_rank=rank, fully_sharded_loras=True)
        tp.calls.clear()
        serve(engine, world, [("qv", token_ids(tokens, 0))], 1)
        return tp.calls

    size, h, hidden = 4, tokens * 2, ("all_reduce", tokens * 48)  # two of six ranks on each
    block = [("all_gather", 3 * h), ("all_reduce", tokens * rank), hidden]  # of attention: qkv, o
    block += [("all_gather", 2 * h), ("all_reduce", tokens * rank), hidden]  # of the MLP: gate and up, down
    for calls in engines_in_lockstep(monkeypatch, size, work):
        assert calls == [hidden, *block * 2, ("all_gather", 25)]


def test_a_process_keeps_its_share_of_an_adapter_and_no_more(world_of, monkeypatch):
    world = world_of("llama-llama3-rope")

    def work(tp):
        engine = world.engine(**{**OPTIONS, "max_lora_rank": 12})
        engine.add_lora(world.request("all"))
        return engine.adapters.manager.get_adapter(2)

    (alone,), parts = engines_in_lockstep(monkeypatch, 1, work), engines_in_lockstep(monkeypatch, 2, work)

    for rank, lora in enumerate(parts):
        for name, whole in alone.loras.items():
            for own, all_of in zip(lora.loras[name].parts, whole.parts, strict=True):
                a, b = all_of.lora_a, all_of.lora_b
                is_row = name.endswith(("o_proj", "down_proj"))
                assert torch.equal(own.lora_a, a.chunk(2, dim=1)[rank] if is_row else a)
                assert torch.equal(own.lora_b, b if is_row else b.chunk(2)[rank])
                kept = [t.untyped_storage().nbytes() for t in (own.lora_a if is_row else own.lora_b,)]
                assert kept == [(own.lora_a if is_row else own.lora_b).nbytes]
