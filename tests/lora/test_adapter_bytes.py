"""What adapters in memory are said to take is what the allocator gave out for them."""

import pytest
import torch

from minivllm import LoRARequest
from minivllm.lora.lora_model import storage_bytes
from tests.tools.limits import allocated_by
from tests.worlds.adapters import save_adapter
from tests.worlds.engines import TinyWorld, tiny_world
from tests.worlds.models import save_base

# Adapters that lie in memory in different ways: A's shared by the parts of a fused linear, B's scaled or not (what is
# not scaled stays a piece of the file's B), experts packed into one tensor.
CASES = {
    "one-by-one": ("llama-llama3-rope", {"r": 8, "lora_alpha": 6, "target_modules": "all-linear"}),
    "embeddings": ("qwen2-tied", {"r": 5, "lora_alpha": 5, "target_modules": ["embed_tokens", "q_proj"]}),
    "fused-and-scaled": (
        "phi3-fused",
        {"r": 4, "lora_alpha": 9, "target_modules": ["qkv_proj", "gate_up_proj"]},
    ),
    "fused": (
        "phi3-fused",
        {"r": 4, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    ),
    "biases": ("phi3-fused", {"r": 4, "lora_alpha": 4, "target_modules": ["qkv_proj"], "lora_bias": True}),
    "experts": (
        "mixtral",
        {
            "r": 3,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


def engine_of(world):
    return world.engine(dtype="float32", max_loras=1, max_cpu_loras=3, bias_enabled=True)


def memory_of(engine):
    return engine.debug_info()["memory"]


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_takes_what_is_told(tmp_path, tmp_path_factory, case):
    variant, config = CASES[case]
    world = bare_world(tmp_path_factory, variant)
    engine = engine_of(world)
    path = save_adapter(tmp_path / "adapter", world.base, 0, **config)

    # Its file is in float64, so that every tensor is converted, and none is the file's own memory.
    _, taken = allocated_by(lambda: engine.add_lora(LoRARequest("a", 1, str(path))), with_numpy=True)

    memory = memory_of(engine)
    assert memory["cpu_total"] == taken
    assert memory["cpu_bytes_by_adapter"] == {1: taken}
    is_shared = case.startswith("fused") or case == "biases"
    assert (memory["slot_bytes_by_adapter"][1] > taken) == is_shared  # a slot has an A for each part


def bare_world(tmp_path_factory, variant):
    """A world without the four adapters, which not every kind of model takes."""
    folder = tmp_path_factory.mktemp("world")
    save_base(folder / "base", variant)
    return TinyWorld(folder, variant)


def test_what_two_adapters_share_counts_once_in_all(tmp_path_factory):
    world = tiny_world(tmp_path_factory)
    engine, request = engine_of(world), world.request("all")
    engine.add_lora(request)
    manager = engine.adapters.manager

    manager.add_adapter(manager.get_adapter(request.lora_int_id).clone(9))

    memory = memory_of(engine)
    (one, other) = memory["cpu_bytes_by_adapter"].values()
    assert one == other == memory["cpu_total"]


def test_what_has_left_memory_is_not_told_any_more(tmp_path_factory):
    world = tiny_world(tmp_path_factory)
    engine = engine_of(world)

    def load_and_remove():
        for name in world.names[:3]:
            engine.add_lora(world.request(name))
        for name in world.names[:2]:
            engine.remove_lora(world.request(name).lora_int_id)

    _, taken = allocated_by(load_and_remove, with_numpy=True)

    assert memory_of(engine)["cpu_total"] == taken


def test_a_view_keeps_all_that_it_is_a_view_of():
    whole = torch.zeros(100, 4)

    assert storage_bytes([whole[:1]]) == storage_bytes([whole[:50], whole[50:], whole]) == 1600
    assert storage_bytes([torch.zeros(3), torch.zeros(3), torch.zeros(0)]) == 24
