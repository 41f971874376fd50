"""Adapters on the input and the output embedding, in one batch with others: each request's tokens and logits are
those of transformers + PEFT for it alone.
"""

from functools import partial

import pytest
import torch

from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import TinyWorld, crossed, greedy, made_once
from tests.worlds.settings import BACKENDS, EACH_BACKEND, OF_OPTIONS

TARGETS = {
    "qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "embed": {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens"]},
    "head": {"r": 6, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "both": {
        "r": 5,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "lm_head", "q_proj", "o_proj", "down_proj"],
        "rank_pattern": {"embed_tokens": 2, "lm_head": 8, "o_proj": 3},
        "alpha_pattern": {"embed_tokens": 3, "lm_head": 9.5},
    },
    "embed and mlp": {"r": 8, "lora_alpha": 8, "target_modules": ["embed_tokens", "gate_proj", "up_proj"]},
}
# On a tied base PEFT gives the head the embedding's adapter only when it is told to.
TIED = {"tied": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens"], "ensure_weight_tying": True}}
VARIANTS = {
    "llama-llama3-rope": TARGETS,
    "qwen2-tied": {**TARGETS, **TIED},
    "llama-linear-rope-biases-tied": {**TARGETS, **TIED},
}
SETTINGS = {
    **OF_OPTIONS,
    "room for tokens that none adds": {"max_loras": 6, "max_cpu_loras": 6, "lora_extra_vocab_size": 5},
}


class EndsWorld(TinyWorld):
    def __init__(self, folder, variant):
        super().__init__(folder, variant, VARIANTS[variant])


made = partial(made_once, EndsWorld)


@pytest.fixture(params=VARIANTS)
def world(request, tmp_path_factory):
    return made(tmp_path_factory, request.param)


@pytest.fixture
def tied(tmp_path_factory):
    return made(tmp_path_factory, "qwen2-tied")


@pytest.mark.parametrize(("variant", "setting"), crossed(VARIANTS, SETTINGS))
def test_a_mixed_batch_gives_each_request_what_peft_gives_it(tmp_path_factory, variant, setting):
    world = made(tmp_path_factory, variant)
    engine = world.engine(**{"max_cpu_loras": 6, **SETTINGS[setting]})

    world.assert_serves(engine, world.workload())


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_every_backend_gives_them(tied, backend):
    engine = tied.engine(max_loras=6, max_cpu_loras=6, punica_backend=backend)

    tied.assert_serves(engine, tied.workload(rows=2), max_tokens=5, tolerance=BACKENDS[backend])


@pytest.mark.parametrize("backend", without_gpu_at_night(["loops"], "triton"))
def test_in_chunks_too(tied, backend):
    """A prompt's last chunk is sampled, the others are not: rows of logits are not the batch's tokens."""
    engine = tied.engine(max_loras=6, max_cpu_loras=6, max_num_batched_tokens=7, punica_backend=backend)

    tied.assert_serves(engine, tied.workload(2, rows=2), max_tokens=4, tolerance=BACKENDS[backend])
    assert engine.trace.summary()["chunks"] > 0


def test_a_slot_that_had_such_an_adapter_serves_one_that_leaves_embeddings_alone(world):
    engine = world.engine(max_loras=1, max_cpu_loras=6)

    for name in ["both", "qv", "embed", "head", "qv", "both", None]:
        world.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])])

    assert engine.get_metrics()["lora"]["evictions"] >= 5


def test_the_adapters_move_the_logits_and_differ_from_one_another(world):
    """Agreement proves nothing of adapters that change nothing."""
    prompt = [5, 9, 60, 3, 5, 17]
    base = world.oracle_of(None).logits(None, [prompt])

    moved = {name: world.oracle_of(name).logits(name, [prompt]) - base for name in world.names}

    for name, shift in moved.items():
        assert shift.abs().max() > 0.1 * base.abs().max(), name
        others = [other for other in world.names if other != name]
        assert all(not torch.allclose(shift, moved[other]) for other in others), name


def test_what_peft_ties_moves_the_head_as_well(tied):
    """PEFT saves such an adapter for both ends; one that is not told to tie leaves the head alone."""
    names = {name: sorted(peft_modules(tied.path(name))) for name in ("embed", "tied")}

    assert names == {"embed": ["model.embed_tokens"], "tied": ["lm_head", "model.embed_tokens"]}


def peft_modules(folder):
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if "base_layer" not in name]  # noqa: SIM118 (no dict)
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}


def test_an_engine_that_leaves_embeddings_out_refuses_such_an_adapter(world):
    engine = world.engine(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])

    with pytest.raises(ValueError, match=r"'model\.embed_tokens'.*wraps only target_modules"):
        engine.add_request("a", [3], greedy(2), lora_request=world.request("embed"))

    world.assert_serves(engine, [("qv", [3, 4]), (None, [3, 4])])
