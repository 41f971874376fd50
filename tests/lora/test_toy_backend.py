"""A tiny model on the tests' toy backend, which is written from the contract alone."""

import ast
from dataclasses import replace

from minivllm import assembly, config
from tests.oracles.toy_backend import ToyBackend
from tests.tools.house import ROOT
from tests.worlds.engines import tiny_world

SOURCE = ROOT / "tests" / "oracles" / "toy_backend.py"
CONTRACT = {"torch", "minivllm.lora.backend", "minivllm.lora.slots", "minivllm.layers.linear"}


def test_it_knows_the_contract_alone():
    tree = ast.parse(SOURCE.read_text())

    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert names <= CONTRACT


def test_four_adapters_and_base_in_one_batch_get_their_tokens_and_logits(monkeypatch, tmp_path_factory):
    def make(max_tokens: int, max_samples: int, device: object, _: object) -> ToyBackend:
        return ToyBackend(device)

    backends = {**assembly.LORA_EXTENSIONS.backends, "toy": make}
    monkeypatch.setattr(assembly, "LORA_EXTENSIONS", replace(assembly.LORA_EXTENSIONS, backends=backends))
    monkeypatch.setattr(config, "PUNICA_BACKENDS", (*config.PUNICA_BACKENDS, "toy"))

    world = tiny_world(tmp_path_factory)
    world.assert_serves(world.engine(punica_backend="toy", max_loras=4), world.workload())
