"""Engines on tiny models, the adapters they serve, and loops around them."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from tests.oracles.peft import Oracle
from tests.tools.forked import forked_processes
from tests.worlds.adapters import ADAPTERS, AdapterFolders, save_adapter
from tests.worlds.models import character_tokenizer, save_base, token_ids
from tests.worlds.processes import FAR_CALLS

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


class TinyWorld(AdapterFolders):
    """A base model's folder, and the folder of each of its adapters.

    adapters    name -> options of PEFT's LoraConfig; the id of the n-th is n
    overrides   of the model's config
    """

    def __init__(
        self,
        folder: Path,
        variant: str = "llama-llama3-rope",
        adapters: Mapping[str, dict] = ADAPTERS,
        dtype: torch.dtype = torch.float64,
        **overrides: object,
    ) -> None:
        self.folder, self.variant, self.dtype, self.names = folder, variant, dtype, list(adapters)
        self.base = folder / "base"
        self._oracles: dict[torch.dtype, Oracle] = {}
        self._oracles_of: dict[str | None, Oracle] = {}
        if not self.base.exists():
            save_base(self.base, variant, dtype, **overrides)
            character_tokenizer().save_pretrained(self.base)
            for seed, (name, config) in enumerate(adapters.items()):
                save_adapter(self.path(name), self.base, seed, **config)

    def oracle(self, dtype: torch.dtype = torch.float64) -> Oracle:
        """transformers + PEFT with all adapters."""
        if dtype not in self._oracles:
            oracle = self._oracles[dtype] = Oracle(self.base, dtype)
            for name in self.names:
                oracle.load(name, self.path(name))
        return self._oracles[dtype]

    def oracle_of(self, name: str | None) -> Oracle:
        """A model of its own for an adapter, since adapters may change what is tied; None = base."""
        if name not in self._oracles_of:
            self._oracles_of[name] = self.make_oracle(name)
        return self._oracles_of[name]

    def make_oracle(self, name: str | None) -> Oracle:
        oracle = Oracle(self.base)
        if name is not None:
            oracle.load(name, self.path(name))
        return oracle

    def answer(self, name: str | None, prompt: list[int], max_tokens: int) -> list[int]:
        return self.oracle_of(name).greedy(name, prompt, max_tokens)

    def engine(self, tokenizer: object = None, **options: object) -> LLMEngine:
        """Two slots for four adapters and small blocks, unless told otherwise; no text without a tokenizer."""
        return make_engine(self.base, tokenizer, options)

    def engine_process(self, tokenizer: object = None, **options: object) -> "EngineProcess":
        """The same engine in a process of its own."""
        return engine_process(make_engine, self.base, tokenizer, options)

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.base), **{**OPTIONS, **options})

    def workload(self, seed: int = 0, rows: int = 3, adapters: list[str] | None = None) -> list[tuple]:
        """(adapter, prompt) pairs: the base and every adapter `rows` times, two of them on the same prompts."""
        rng = random.Random(seed)
        names = [None, *(self.names if adapters is None else adapters)]
        shared = [token_ids(n, seed + n) for n in (12, 5)]
        pairs = [(name, prompt) for name in names for prompt in shared[: rows - 1]]
        pairs += [(name, token_ids(rng.randint(1, 18), 50 * seed + i)) for i, name in enumerate(names)]
        rng.shuffle(pairs)
        return pairs

    def assert_serves(
        self, engine: LLMEngine, pairs: list[tuple], max_tokens: int = 8, tolerance: float = 1e-10
    ) -> None:
        """All at once: each request's tokens are its oracle's, and its logits, to a share of the largest."""
        params = [greedy(max_tokens) for _ in pairs]
        with watch_logits(engine, params) as seen:
            for number, (name, prompt) in enumerate(pairs):
                engine.add_request(str(number), prompt, params[number], lora_request=self.request(name))
            outputs = run(engine)
        for number, (name, prompt) in enumerate(pairs):
            tokens = tokens_of(outputs[str(number)])
            assert tokens == self.answer(name, prompt, max_tokens), f"{number}: {name}"
            expected = self.oracle_of(name).logits(name, [prompt + tokens])[0, len(prompt) - 1 : -1]
            assert_logits(torch.stack(seen[number]), expected, tolerance, f"{number}: {name}")


def make_engine(model: Path, tokenizer: object, options: dict[str, object]) -> LLMEngine:
    torch.set_num_threads(1)  # as in conftest.py, also in a process of its own
    args = EngineArgs(model=str(model), **{**OPTIONS, **options})
    return LLMEngine(args.create_engine_config(), tokenizer, warm_up=args.warm_up)


def engine_process(make: Callable[..., LLMEngine], *args: object) -> "EngineProcess":
    """A process that makes an engine."""
    from minivllm.serving.engine_process import EngineProcess  # most tests have no engine beside them

    with forked_processes():
        return EngineProcess(partial(make, *args), more_calls=FAR_CALLS)


_made: dict[Path, Any] = {}


def made_once(
    kind: Callable, tmp_path_factory: pytest.TempPathFactory, variant: str = "llama-llama3-rope"
) -> Any:
    """The world `kind(folder, variant)`; made once a test run, however many modules ask for it."""
    folder = tmp_path_factory.getbasetemp() / f"{kind.__name__}-{variant}"
    if folder not in _made:
        _made[folder] = kind(folder, variant)
    return _made[folder]


tiny_world = partial(made_once, TinyWorld)


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


@contextmanager
def watch_logits(engine: LLMEngine, params: list) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The rows of logits of every request as they are sampled, by the number of its SamplingParams object."""
    number_of = {id(param): number for number, param in enumerate(params)}
    seen: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(params))}

    def note(sampler, args):
        for row, param in zip(args[0], args[1], strict=True):
            seen[number_of[id(param)]].append(row.double().cpu())

    hook = engine.runner.sampler.register_forward_pre_hook(note)
    yield seen
    hook.remove()


def assert_logits(ours: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Rows may be wider than the oracle's: what it does not know must be -inf. (steps, V + X), (steps, V + n)"""
    missing = torch.full((len(expected), ours.shape[1] - expected.shape[1]), -torch.inf, dtype=torch.float64)
    expected = torch.cat([expected.double(), missing], dim=1)
    impossible = expected == -torch.inf
    assert torch.equal(ours == -torch.inf, impossible), f"{what}: other tokens are impossible"
    off = (ours - expected).masked_fill(impossible, 0).abs().max()
    assert off <= tolerance * expected[~impossible].abs().max(), f"{what}: off by {off}"


def crossed(variants: Iterable[str], settings: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of a kind of model and a setting of the engine: the first kind in all settings, the others in one.

    What a model is and how little room an engine has are nothing to each other, so not every pair says something new.
    """
    (first, *others), settings = variants, [*settings]
    one_each = [(variant, settings[-1 - n % 2]) for n, variant in enumerate(others)]
    return [(first, setting) for setting in settings] + one_each
