"""A tiny base model with DoRA adapters beside plain ones, and what PEFT answers, one adapter at a time."""

import random
from functools import partial
from pathlib import Path

from minivllm import LLMEngine
from tests.worlds.adapters import ADAPTERS
from tests.worlds.arrivals import Asked, check_answers, serve_arrivals
from tests.worlds.engines import TinyWorld, greedy, made_once
from tests.worlds.models import token_ids

# Of the same shapes and patterns as the plain ones, and one that has other weights when it is loaded again.
DORA = {f"dora-{name}": {**config, "use_dora": True} for name, config in ADAPTERS.items()}
PHI3 = {
    "qv": ["qkv_proj"],
    "mlp": ["gate_up_proj", "down_proj"],
    "patterns": ["qkv_proj", "o_proj", "down_proj"],
}
PLAIN = {name: ADAPTERS[name] for name in ("qv", "all")}
AGAIN = {"dora-qv": "dora-mlp-again", "dora-all": "all"}


class DoRAWorld(TinyWorld):
    """Folders of DoRA adapters and of plain ones."""

    def __init__(self, folder: Path, variant: str) -> None:
        configs = {**DORA, **PLAIN, "dora-mlp-again": DORA["dora-mlp"]}
        if variant == "phi3-fused":
            for name in configs:
                kind = name.removeprefix("dora-").removesuffix("-again")
                if kind in PHI3:
                    configs[name] = {**configs[name], "target_modules": PHI3[kind]}
        super().__init__(folder, variant, configs)

    def engine(self, **options: object) -> LLMEngine:
        return super().engine(**{"enable_dora": True, **options})

    def check_answers(self, asked: list[Asked]) -> int:
        return check_answers(
            asked,
            lambda folder, group: self.oracle().logits(folder, [one.prompt + one.answer for one in group]),
        )


def serve(world: DoRAWorld, engine: LLMEngine, rng: random.Random, count: int) -> list[Asked]:
    """Requests of all adapters and base; now and then an adapter is loaded again."""
    folders = {name: name for name in (*DORA, *PLAIN)}
    prefixes = [token_ids(rng.randint(4, 20), seed) for seed in range(4)]

    def ask(request_id: str) -> Asked:
        prompt = rng.choice([[], *prefixes]) + token_ids(rng.randint(1, 20), rng.randrange(10**6))
        name = rng.choice([None, *folders])
        request = None
        if name is not None:
            changes = {}
            if name in AGAIN and rng.random() < 0.15:
                folders[name] = AGAIN[name] if folders[name] == name else name
                changes = {"load_inplace": True}
            request = world.request(name, lora_path=str(world.path(folders[name])), **changes)
        engine.add_request(request_id, prompt, greedy(rng.randint(1, 12)), lora_request=request)
        return Asked(name and folders[name], prompt)

    return list(serve_arrivals(engine, rng, count, ask).values())


dora_world = partial(made_once, DoRAWorld)
