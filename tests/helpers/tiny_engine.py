"""Engines on tiny models, the adapters they serve, and loops around them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from far_engine import FAR_CALLS
from tiny_adapters import ADAPTERS, save_adapter, save_base
from tiny_oracle import Oracle
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minivllm import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.serving.engine_process import EngineProcess

OPTIONS = {
    "dtype": "float64",
    "device": "cpu",  # the GPU's kernels know no float64; tests/gpu says what runs there
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 4,
    "max_lora_rank": 16,
    "block_size": 4,
    "num_kv_blocks": 200,
    "max_logprobs": -1,
    "warm_up": False,
}


class AdapterFolders:
    """Adapters in folders of their own.

    folder   where these lie, each under its adapter's name
    names    of the adapters; the id of names[i] is i + 1
    """

    folder: Path
    names: list[str]

    def path(self, name: str) -> Path:
        return self.folder / name

    def request(self, name: str | None, **changes: object) -> LoRARequest | None:
        """The LoRARequest that names one of the adapters; None for the base model."""
        if name is None:
            return None
        values = {
            "lora_name": name,
            "lora_int_id": self.names.index(name) + 1,
            "lora_path": str(self.path(name)),
        }
        return LoRARequest(**{**values, **changes})


class TinyWorld(AdapterFolders):
    """A base model's folder and the folders of four adapters for it, `tiny_adapters.ADAPTERS`."""

    def __init__(self, folder: Path, variant: str, dtype: torch.dtype = torch.float64) -> None:
        self.folder = folder
        self.variant = variant
        self.base = folder / "base"
        self.names = list(ADAPTERS)
        self.dtype = dtype
        self._oracles: dict[torch.dtype, Oracle] = {}
        if not folder.exists():
            save_base(self.base, variant, dtype)
            character_tokenizer().save_pretrained(self.base)
            for seed, (name, config) in enumerate(ADAPTERS.items()):
                save_adapter(self.path(name), self.base, seed, **config)

    def oracle(self, dtype: torch.dtype = torch.float64) -> Oracle:
        """transformers + PEFT with all four adapters."""
        if dtype not in self._oracles:
            oracle = self._oracles[dtype] = Oracle(self.base, dtype)
            for name in self.names:
                oracle.load(name, self.path(name))
        return self._oracles[dtype]

    def engine(self, tokenizer: object = None, **options: object) -> LLMEngine:
        """Two slots for four adapters and small blocks, unless told otherwise; no text without a tokenizer."""
        return make_engine(self.base, tokenizer, options)

    def engine_process(self, tokenizer: object = None, **options: object) -> "EngineProcess":
        """The same engine in a process of its own."""
        from minivllm.serving.engine_process import EngineProcess  # most tests have no engine beside them

        return EngineProcess(partial(make_engine, self.base, tokenizer, options), more_calls=FAR_CALLS)

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.base), **{**OPTIONS, **options})


def make_engine(model: Path, tokenizer: object, options: dict[str, object]) -> LLMEngine:
    torch.set_num_threads(1)  # as in conftest.py, also in a process of its own
    args = EngineArgs(model=str(model), **{**OPTIONS, **options})
    return LLMEngine(args.create_engine_config(), tokenizer, warm_up=args.warm_up)


def character_tokenizer() -> object:
    """A fast tokenizer of transformers around `character_backend`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=character_backend(), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def character_backend() -> Tokenizer:
    """For a vocabulary of 97: three special tokens, then the characters from space to `}`."""
    special = ["<pad>", "<s>", "</s>"]
    characters = ["Ġ", *map(chr, range(ord("!"), ord("}") + 1))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *characters])}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_worlds: dict[Path, TinyWorld] = {}


def tiny_world(tmp_path_factory: pytest.TempPathFactory, variant: str = "llama-llama3-rope") -> TinyWorld:
    """The world of one kind of model; made once a test run, however many modules ask for it."""
    folder = tmp_path_factory.getbasetemp() / f"world-{variant}"
    if folder not in _worlds:
        _worlds[folder] = TinyWorld(folder, variant)
    return _worlds[folder]


def greedy(max_tokens: int = 8, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def run(engine: LLMEngine, max_steps: int = 3000) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of every request."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, f"{output.request_id} ended twice"
                finished[output.request_id] = output
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests are left after {max_steps} steps")


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def snapshot(engine: LLMEngine) -> dict[str, object]:
    """What must be as before when something was refused: the engine's own account, the registry, the blocks."""
    info = engine.debug_info()
    for changes_anyhow in ("errors", "peak_memory"):
        del info[changes_anyhow]
    info["blocks"] = list(engine.scheduler.kv_cache.block_pool.ref_cnt)
    info["states"] = sorted(engine.output_processor.states)
    if engine.adapters is not None:
        info["registry"] = {i: (e.request, sorted(e.names)) for i, e in engine.adapters.adapters.items()}
    return info
