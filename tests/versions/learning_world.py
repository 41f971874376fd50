"""A tiny base model with an adapter that is updated while it serves, and what PEFT says of each version."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from minivllm import LLMEngine, RequestOutput, SamplingParams
from minivllm.versions.weights import token_versions
from tests.worlds import arrivals
from tests.worlds.adapters import ADAPTERS
from tests.worlds.engines import TinyWorld, made_once, tokens_of
from tests.worlds.models import token_ids

# What is in the updates: the same shapes, another rank, other modules.
POLICY = ADAPTERS["qv"]
WEIGHTS = {
    "policy": POLICY,
    "again": POLICY,
    "third": POLICY,
    "higher": {**POLICY, "r": 11},
    "elsewhere": ADAPTERS["mlp"],
}
BESIDE = {"all": ADAPTERS["all"], "patterns": ADAPTERS["patterns"]}


@dataclass
class Asked(arrivals.Asked):
    """`whose` is an adapter's name.   folders: of each token of the answer, None = base"""

    folders: list[str | None] = field(default_factory=list)


class LearningWorld(TinyWorld):
    """The adapter "policy" beside two that nobody updates; every set of its weights is in a folder of its own."""

    def __init__(self, folder: Path, variant: str) -> None:
        super().__init__(folder, variant, {**WEIGHTS, **BESIDE})

    def tensors(self, folder: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(folder) / "adapter_model.safetensors")

    def config(self, folder: str) -> dict:
        return json.loads((self.path(folder) / "adapter_config.json").read_text())

    def update(self, engine: LLMEngine, folder: str, **options: object) -> int:
        """From tensors."""
        return engine.update_lora("policy", self.tensors(folder), peft_config=self.config(folder), **options)

    def logprobs(self, one: Asked, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Of the answer's tokens, each by the version that sampled it."""
        tokens = tokens_of(one.output)
        text, first = one.prompt + tokens, len(one.prompt) - 1
        found = torch.zeros(len(tokens), dtype=torch.float64)
        for folder in dict.fromkeys(one.folders):
            own = self.oracle(dtype).logits(folder, [text])[0, first:-1].double().log_softmax(-1)
            for i, token in enumerate(tokens):
                if one.folders[i] == folder:
                    found[i] = own[i, token]
        return found

    def check(self, asked: list[Asked], folder_of: dict[int, str], tolerance: float = 1e-9) -> int:
        """Logprobs of all sampled tokens are PEFT's for the version that each says; tokens counted.

        folder_of   version -> folder
        """
        count = 0
        for one in asked:
            assert one.output is not None and one.output.error is None, one
            tokens = tokens_of(one.output)
            one.folders = [one.whose] * len(tokens)
            if one.whose == "policy":
                versions = token_versions(one.output.lora_request, len(tokens))
                one.folders = [folder_of[version] for version in versions]
            off = (ours(one.output) - self.logprobs(one)).abs().max()
            assert off < tolerance, f"{one.whose} {one.prompt} {one.folders}: off by {off}"
            count += len(tokens)
        return count


def ours(output: RequestOutput) -> torch.Tensor:
    """The engine's logprobs of the tokens that it sampled."""
    answer = output.outputs[0]
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs], dtype=torch.float64)


def sampled(rng: random.Random, most: int = 12) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, most),
        ignore_eos=True,
        logprobs=0,
    )


def serve(
    world: LearningWorld, engine: LLMEngine, rng: random.Random, count: int
) -> tuple[list[Asked], dict[int, str]]:
    """Requests of all adapters that arrive while others run, and updates at random steps; version -> folder."""
    folder_of, prefixes = {0: "policy"}, [token_ids(rng.randint(4, 20), seed) for seed in range(3)]
    engine.add_lora(world.request("policy"))

    def update(step: Callable[[], None]) -> None:
        if rng.random() < 0.2:
            folder, running = rng.choice(list(WEIGHTS)), rng.choice(["finish", "restart"])
            try:
                folder_of[world.update(engine, folder, running=running)] = folder
            except RuntimeError as error:
                assert "in memory" in str(error)

    def ask(request_id: str) -> Asked:
        prompt = rng.choice([[], *prefixes]) + token_ids(rng.randint(1, 16), rng.randrange(10**6))
        name = rng.choice([None, "policy", "policy", "policy", *BESIDE])
        engine.add_request(request_id, prompt, sampled(rng), lora_request=world.request(name))
        return Asked(name, prompt)

    return list(arrivals.serve_arrivals(engine, rng, count, ask, update).values()), folder_of


learning_world = partial(made_once, LearningWorld)
