"""Every layer runs on a backend of a few lines, written from the contract alone."""

import ast
from dataclasses import replace

import pytest
import torch
from test_moe_layer import MIXED, RANK, SLOTS, base_layer, batch, labels, one_by_one, random_adapter

from minivllm import assembly, config
from minivllm.config import LoRAConfig
from minivllm.lora.mapping import LoRAMapping
from minivllm.vllm.utils import from_layer
from tests.oracles.rows import assert_rows_equal
from tests.oracles.toy_backend import ToyBackend
from tests.tools.house import ROOT
from tests.worlds.engines import TinyWorld

ADAPTERS = {
    "all": {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"},
    "ends": {"r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "rank pattern": {"r": 2, "target_modules": ["k_proj", "up_proj"], "rank_pattern": {"k_proj": 4}},
}


def test_it_knows_the_contract_alone():
    tree = ast.parse((ROOT / "tests" / "oracles" / "toy_backend.py").read_text())

    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert names <= {"torch", "minivllm.lora.backend", "minivllm.lora.slots", "minivllm.layers.linear"}


def test_it_serves_a_model_as_transformers_and_peft_do(monkeypatch, tmp_path):
    """Under a name of its own."""
    make = {"toy": lambda tokens, samples, device, config: ToyBackend(device)}
    backends = {**assembly.LORA_EXTENSIONS.backends, **make}
    monkeypatch.setattr(assembly, "LORA_EXTENSIONS", replace(assembly.LORA_EXTENSIONS, backends=backends))
    monkeypatch.setattr(config, "PUNICA_BACKENDS", (*config.PUNICA_BACKENDS, "toy"))
    world = TinyWorld(tmp_path, "llama-llama3-rope", ADAPTERS)

    engine = world.engine(max_loras=3, punica_backend="toy")

    world.assert_serves(engine, world.workload(1, rows=2), max_tokens=3)


@pytest.mark.parametrize("parts", [["w1", "w3"], ["w13"]], ids=["three slices", "gate and up in one"])
def test_it_adds_what_experts_have(parts):
    base = base_layer()
    layer = from_layer(base, SLOTS, LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS), parts)
    toy = ToyBackend("cpu")
    layer.set_mapping(toy)
    adapters = [random_adapter(seed, (3, 2, 3)) for seed in range(SLOTS)]
    for slot, ((a1, a2, a3), (b1, b2, b3)) in enumerate(adapters):
        if len(parts) == 1:
            adapters[slot] = [a1, a2, a1], [b1, b2, b3]
            layer.set_lora(slot, [a1, a2], [torch.cat([b1, b3], dim=1), b2])
        else:
            layer.set_lora(slot, [a1, a2, a3], [b1, b2, b3])
    ids = [slot + 1 for slot in MIXED]
    toy.begin_step(LoRAMapping(ids, ids), [1, 2, 3])
    x, router_logits = batch(len(MIXED))

    actual = layer(x, router_logits)

    expected = one_by_one(base, adapters, MIXED, x, router_logits)
    assert_rows_equal(actual, expected, labels=labels(MIXED), tolerance=1e-12)
