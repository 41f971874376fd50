"""A tiny base model with adapters and mixes of them, and what PEFT's `add_weighted_adapter` answers to all of them."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from minivllm import LLMEngine, LoRARequest
from minivllm.mixes import mix
from tests.worlds.adapters import ADAPTERS
from tests.worlds.arrivals import Asked, check_answers, serve_arrivals
from tests.worlds.engines import TinyWorld, greedy, made_once
from tests.worlds.models import token_ids

# PEFT mixes no adapter that names all linears by a word with one that lists them.
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LISTED = {**ADAPTERS, "all": {**ADAPTERS["all"], "target_modules": LINEARS}}
PHI3 = {
    "qv": ["qkv_proj"],
    "all": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "mlp": ["gate_up_proj", "down_proj"],
    "patterns": ["qkv_proj", "o_proj", "down_proj"],
}
# Other weights, and another rank, for an adapter's id.
AGAIN = {"qv": "qv-again", "mlp": "mlp-again"}
RANK = 32  # of "all", "patterns" and "mlp" together there are up to 23

Weights = tuple[tuple[str, float], ...]  # folder, weight


class MixedWorld(TinyWorld):
    """Folders of adapters that are mixed, and of those whose weights they get when they are loaded again."""

    def __init__(self, folder: Path, variant: str) -> None:
        configs = {**LISTED, **{name: {**LISTED[old], "r": 5} for old, name in AGAIN.items()}}
        if variant == "phi3-fused":
            for name in configs:
                configs[name] = {**configs[name], "target_modules": PHI3[name.removesuffix("-again")]}
        super().__init__(folder, variant, configs)

    def mixed_in_peft(self, weights: Weights) -> str | None:
        """The name of PEFT's adapter; it is made when it is asked for first. None = base."""
        if not weights or (weights[1:] == () and weights[0][1] == 1):
            return weights[0][0] if weights else None
        from peft.tuners.lora import LoraLayer

        oracle = self.oracle()
        peft = oracle.peft
        name = f"mix {weights}".replace(".", "_")
        if name not in peft.peft_config:
            folders, factors = zip(*weights)
            peft.base_model.add_weighted_adapter(list(folders), list(factors), name, combination_type="cat")
            for module in peft.modules():
                # Scalings and weights are in the tensors by now. But the new adapter has `use_rslora` of the first one,
                # and PEFT would scale by the square root of the rank once more.
                if isinstance(module, LoraLayer) and name in module.scaling:
                    module.scaling[name] = 1.0
            peft.to(oracle.dtype).eval()
        return name

    def engine(self, tokenizer: object = None, **options: object) -> LLMEngine:
        return super().engine(tokenizer, **{"max_lora_rank": RANK, **options})

    def check_answers(self, asked: list[Asked]) -> int:
        """`whose` are folders with their weights."""

        def logits_of(weights: Weights, group: list[Asked]) -> torch.Tensor:
            name = self.mixed_in_peft(weights)
            return self.oracle().logits(name, [one.prompt + one.answer for one in group])

        return check_answers(asked, logits_of)


def some_mixes(rng: random.Random, count: int = 6) -> list[Weights]:
    """Names with weights, among them the same adapters with others, one adapter alone, and a weight of 0."""
    made = [(("qv", 0.7), ("all", 0.3)), (("qv", 0.3), ("all", 0.7)), (("mlp", -0.5),)]
    while len(made) < count:
        names = rng.sample(list(LISTED), rng.randint(2, 3))
        made.append(tuple((name, rng.choice([0, 1, -0.4, round(rng.uniform(0.1, 2), 3)])) for name in names))
    return made


def serve(world: MixedWorld, engine: LLMEngine, rng: random.Random, count: int) -> list[Asked]:
    """Requests of mixes, of their parts alone and of base; now and then a part is loaded again from another folder, or
    unloaded before it comes back from there, while mixes of it run."""
    folders = {name: name for name in LISTED}
    prefixes = [token_ids(rng.randint(4, 20), seed) for seed in range(3)]
    mixes = some_mixes(rng)

    def part(name: str, **changes: object) -> LoRARequest:
        return world.request(name, lora_path=str(world.path(folders[name])), **changes)

    def unload(step: Callable[[], None]) -> None:
        if rng.random() < 0.05:
            name = rng.choice(list(AGAIN))
            engine.remove_lora(part(name).lora_int_id)
            while engine.adapters.adapters.get(part(name).lora_int_id):
                step()
            folders[name] = AGAIN[name] if folders[name] == name else name

    def reload(request_id: str, prompt: list[int]) -> Asked:
        name = rng.choice(list(AGAIN))
        folders[name] = AGAIN[name] if folders[name] == name else name
        request = part(name, load_inplace=True)
        engine.add_request(request_id, prompt, greedy(2), lora_request=request)
        return Asked(((folders[name], 1),), prompt)

    def ask(request_id: str) -> Asked:
        prompt = rng.choice([[], *prefixes]) + token_ids(rng.randint(1, 20), rng.randrange(10**6))
        if rng.random() < 0.1:
            return reload(request_id, prompt)
        weights = rng.choice([(), *[((name, 1),) for name in LISTED], *mixes, *mixes])
        if not weights:
            request = None
        elif len(weights) == 1 and weights[0][1] == 1:
            request = part(weights[0][0])
        else:
            given = [
                (name if name in engine.adapters.by_name and rng.random() < 0.5 else part(name), weight)
                for name, weight in weights
            ]
            request = mix(rng.sample(given, len(given)))
        engine.add_request(request_id, prompt, greedy(rng.randint(1, 12)), lora_request=request)
        return Asked(tuple((folders[name], weight) for name, weight in weights), prompt)

    return list(serve_arrivals(engine, rng, count, ask, unload).values())


mixed_world = partial(made_once, MixedWorld)
