"""The demo model on the tests' toy backend, which is written from the contract alone."""

import ast
from dataclasses import replace

from minivllm import LLM, LoRARequest, assembly, config
from tests.oracles.toy_backend import ToyBackend
from tests.worlds.demo import NAMES, ROOT, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import greedy, tokens_of

SOURCE = ROOT / "tests" / "oracles" / "toy_backend.py"
CONTRACT = {"torch", "minivllm.lora.backend", "minivllm.lora.slots", "minivllm.layers.linear"}
ADAPTERS = ("sql", "json", "dates")


def test_it_knows_the_contract_alone():
    tree = ast.parse(SOURCE.read_text())

    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert names <= CONTRACT


def serve(backend: str) -> list[list[int]]:
    """Answers to a prompt of each of three adapters and one of the base model, in one batch."""
    pairs = {name: prompt for name, prompt in task_prompts(1) if name in (None, *ADAPTERS)}
    llm = LLM(
        demo_base(),
        dtype="float32",
        device="cpu",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=32,
        max_model_len=256,
        num_kv_blocks=60,
        punica_backend=backend,
        warm_up=False,
    )
    adapters = [
        name and LoRARequest(name, NAMES.index(name) + 1, str(adapter_folder(name))) for name in pairs
    ]
    outputs = llm.generate(list(pairs.values()), greedy(10), lora_request=adapters, use_tqdm=False)
    return [tokens_of(output) for output in outputs]


def test_three_adapters_and_base_in_one_batch_get_their_tokens(monkeypatch):
    def make(max_tokens: int, max_samples: int, device: object, _: object) -> ToyBackend:
        return ToyBackend(device)

    backends = {**assembly.LORA_EXTENSIONS.backends, "toy": make}
    monkeypatch.setattr(assembly, "LORA_EXTENSIONS", replace(assembly.LORA_EXTENSIONS, backends=backends))
    monkeypatch.setattr(config, "PUNICA_BACKENDS", (*config.PUNICA_BACKENDS, "toy"))

    tokens = serve("toy")

    # test_engine_demo_tokens.py proves these: they are what transformers and PEFT pick.
    assert tokens == serve("auto")
    assert len({tuple(answer) for answer in tokens}) == 4
