"""A tiny base model with any adapters, mixed batches of them, and one oracle for each adapter alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tiny_adapters import save_adapter, save_base
from tiny_engine import OPTIONS, AdapterFolders, character_tokenizer, greedy, run, tokens_of
from tiny_models import token_ids
from tiny_oracle import Oracle

from minivllm import EngineArgs, LLMEngine


class AdapterSet(AdapterFolders):
    """A base model's folder, and one for each adapter.

    adapters   name -> options of PEFT's LoraConfig; the id of the n-th is n
    """

    def __init__(self, folder: Path, variant: str, adapters: dict[str, dict]) -> None:
        self.folder, self.variant, self.names = folder, variant, list(adapters)
        self.base = save_base(folder / "base", variant)
        character_tokenizer().save_pretrained(self.base)
        for seed, (name, config) in enumerate(adapters.items()):
            save_adapter(folder / name, self.base, seed, **config)
        self._oracles: dict[str | None, Oracle] = {}
        self._answers: dict[tuple, list[int]] = {}

    def oracle(self, name: str | None) -> Oracle:
        """transformers, with PEFT's adapter on it; a model of its own, since adapters may change what is tied."""
        if name not in self._oracles:
            self._oracles[name] = self.make_oracle(name)
        return self._oracles[name]

    def make_oracle(self, name: str | None) -> Oracle:
        oracle = Oracle(self.base)
        if name is not None:
            oracle.load(name, self.path(name))
        return oracle

    def answer(self, name: str | None, prompt: list[int], max_tokens: int) -> list[int]:
        """The oracle's, asked once."""
        key = name, tuple(prompt), max_tokens
        if key not in self._answers:
            self._answers[key] = self.oracle(name).greedy(name, prompt, max_tokens)
        return self._answers[key]

    def engine(self, tokenizer: object = None, **options: object) -> LLMEngine:
        args = EngineArgs(model=str(self.base), **{**OPTIONS, **options})
        return LLMEngine(args.create_engine_config(), tokenizer, warm_up=args.warm_up)

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
            expected = self.oracle(name).logits(name, [prompt + tokens])[0, len(prompt) - 1 : -1]
            assert_logits(torch.stack(seen[number]), expected, tolerance, f"{number}: {name}")


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
