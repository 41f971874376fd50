"""What the test of a bug hunt is made of: a tiny model, adapters of any kind, engines, and answers to compare with.

def test_hunt_07(world):
    engine = world.engine(max_loras=1)
    mine = world.adapter(7, rank=8)

    tokens = world.ask(engine, mine)

    assert tokens == world.answer(mine)
"""

import itertools
import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from pprint import pprint
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minivllm import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.wrapping import from_layer
from minivllm.vllm.layers import LoRAMapping
from minivllm.vllm.punica_selector import get_punica_wrapper
from tests.tools.limits import TimeLimit
from tests.worlds.small import MODULES, USUAL, SmallWorld, Tensors, write_adapter
from tests.worlds.waiting import ends

torch.set_num_threads(
    1
)  # several engines are tried beside each other, and tiny models gain nothing from more

__all__ = [
    "MODULES",
    "PROMPT",
    "HuntWorld",
    "SmallLinear",
    "TimeLimit",
    "greedy",
    "in_a_thread",
    "make_request",
    "make_scheduler",
    "run",
    "tokens_of",
]
CALLS = itertools.count(1)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two full blocks and a token
# Of an engine's `debug_info()`. What is left out is of its options and of the machine.
SHOWN = ("slots", "pinned", "states", "adapters", "running", "waiting", "errors", "metrics")
# Parts of fused modules: the module, and the first of its rows that is the part's.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 32),
    "v_proj": ("qkv_proj", 48),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 48),
}


class HuntWorld(SmallWorld):
    """`engine(**options)` makes one with two slots and room for four adapters in memory, unless told otherwise."""

    def adapter(
        self,
        adapter_id: int,
        *,
        modules: tuple[str, ...] = USUAL,
        rank: int = 4,
        alpha: float = 6,
        seed: int | None = None,
        change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        **config: object,
    ) -> LoRARequest:
        """Write a random adapter, over the one of this id if there is one, and return the request that names it.

        modules   which have A and B: "self_attn.q_proj" (k, v, o), "mlp.gate_proj" (up, down), "lm_head"
        seed      of its weights, None = the id
        change    of the tensors, by PEFT's names, before they are saved
        config    further fields of adapter_config.json, such as use_rslora=True
        """
        folder = self.folder / f"adapter{adapter_id}"
        shutil.rmtree(folder, ignore_errors=True)
        seed = adapter_id if seed is None else seed
        write_adapter(folder, seed, modules=modules, rank=rank, alpha=alpha, change=change, **config)
        return LoRARequest(folder.name, adapter_id, str(folder))

    def merged(self, lora: LoRARequest | None, **options: object) -> LLMEngine:
        """An engine without adapters, to whose weights this adapter's are added, as they are on disk."""
        engine = self.engine(enable_lora=False, **options)
        with torch.no_grad():
            for name, update in updates_of(Path(lora.lora_path)).items() if lora else ():
                parent, dot, end = name.rpartition(".")
                module, first = FUSED.get(end, (end, 0))
                weight = engine.runner.model.get_submodule(parent + dot + module).weight
                weight[first : first + len(update)] += update
        return engine

    def answer(
        self, lora: LoRARequest | None, prompt: list[int] = PROMPT, max_tokens: int = 6, **options: object
    ) -> list[int]:
        """The right tokens, for which no code of adapters is used (`merged`)."""
        return self.ask(self.merged(lora, **options), None, prompt, max_tokens)

    def ask(
        self,
        engine: LLMEngine,
        lora: LoRARequest | None,
        prompt: list[int] = PROMPT,
        max_tokens: int = 6,
        **params: object,
    ) -> list[int]:
        """The tokens that an engine answers one request with, alone. RuntimeError if it ends in an error."""
        return tokens_of(self.ask_all(engine, [lora], prompt, max_tokens, **params)[0])

    def ask_all(
        self,
        engine: LLMEngine,
        loras: list[LoRARequest | None],
        prompt: list[int] = PROMPT,
        max_tokens: int = 6,
        **params: object,
    ) -> list[RequestOutput]:
        """What an engine says to one request for each of these, all at once; in their order."""
        call = next(CALLS)  # the same in every run of a program: `lab compare` compares ids, too
        ids = [f"{i} of {call}" for i in range(len(loras))]
        for request_id, lora in zip(ids, loras):
            engine.add_request(request_id, prompt, greedy(max_tokens, **params), lora_request=lora)
        outputs = run(engine)
        return [outputs[request_id] for request_id in ids]

    def show(self, engine: LLMEngine) -> None:
        """Print the entries of `engine.debug_info()` that requests and adapters change, with its counters."""
        info = engine.debug_info()
        pprint({name: info[name] for name in SHOWN}, width=110, compact=True, sort_dicts=False)


def updates_of(folder: Path) -> Tensors:
    """scaling · B · A of every module of an adapter's folder, in float64. Of patterns plain ends are understood."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    updates = {}
    for full_name in [name for name in tensors if "lora_A" in name]:
        a, b = (tensors[full_name.replace("lora_A", side)].double() for side in ("lora_A", "lora_B"))
        name = full_name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        patterns = config.get("alpha_pattern") or {}
        alpha = next((alpha for end, alpha in patterns.items() if name.endswith(end)), config["lora_alpha"])
        updates[name] = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a)) * b @ a
    return updates


def greedy(max_tokens: int = 6, **params: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def run(engine: LLMEngine, max_steps: int = 500) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of every request. AssertionError if there is no end."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return finished
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests are left after {max_steps} steps")


def tokens_of(output: RequestOutput) -> list[int]:
    """RuntimeError for a request that ended in an error."""
    if output.error:
        raise RuntimeError(output.error)
    return output.outputs[0].token_ids


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What a function gives in a thread of its own; an exception is given back, too. None if the thread hangs."""
    box: list[Any] = []

    def call() -> None:
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    ends(thread)
    return box[0] if box else None


class SmallLinear:
    """One wrapped linear on a backend, with an adapter of rank 4 in each of S slots; the ids are 1..S.

    backend   as for the engine's `punica_backend`, of which the kernels take float32 alone
    """

    def __init__(self, slots: int = 3, backend: str = "grouped", dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = RowParallelLinear(16, 12, True, dtype)
        for parameter in self.base.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        self.weight, self.bias = self.base.weight.clone(), self.base.bias.clone()
        config = LoRAConfig(4, slots, lora_dtype=dtype, punica_backend=backend)
        self.backend = get_punica_wrapper(64, 64, "cpu", lora_config=config)
        self.layer = from_layer(self.base, slots, config, [])
        self.layer.set_mapping(self.backend)
        self.table: list[int | None] = list(range(1, slots + 1))
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for slot, adapter_id in enumerate(self.table):
            pair = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((4, 16), (12, 4))]
            self.layer.set_lora(slot, *([tensor] for tensor in pair))
            self.pairs[adapter_id] = tuple(pair)

    @torch.inference_mode()
    def rows(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """One step; ids: (T,) the adapter of each row, 0 = base.   x: (T, 16) -> (T, 12)"""
        self.backend.update_metadata(LoRAMapping(ids, ids), self.table, len(self.table) + 1, 50)
        return self.layer(x)[0]

    def answer(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """What is right, row by row.   (T, 16) -> (T, 12)"""
        rows = []
        for row, adapter_id in zip(x, ids, strict=True):
            y = self.weight @ row + self.bias
            if adapter_id:
                a, b = self.pairs[adapter_id]
                y = y + b @ (a @ row)
            rows.append(y)
        return torch.stack(rows)


def make_scheduler(max_loras: int = 2, **options: int) -> Scheduler:
    """A scheduler alone; options are `SchedulerConfig`'s. `pinned_adapters` is a set that may be changed."""
    cache = CacheConfig(block_size=4, num_blocks=50, enable_prefix_caching=False)
    lora = LoRAConfig(max_loras=max_loras)
    return Scheduler(SchedulerConfig(**options), cache, lora, pinned_adapters=set())


def make_request(
    request_id: str, adapter_id: int, prompt: list[int] = PROMPT, max_tokens: int = 6
) -> Request:
    """For `Scheduler.add_request`; base is adapter 0."""
    lora = LoRARequest(f"adapter{adapter_id}", adapter_id, f"/adapters/{adapter_id}") if adapter_id else None
    return Request(request_id, prompt, greedy(max_tokens), lora)


@pytest.fixture
def world(tmp_path: Path) -> HuntWorld:
    """A tiny model in a folder of its own, for which adapters can be written."""
    return HuntWorld(tmp_path)
