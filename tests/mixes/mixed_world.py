"""A tiny base model with adapters and mixes of them, and what PEFT's `add_weighted_adapter` answers to all of them."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from minivllm import LLMEngine, LoRARequest
from minivllm.mixes import mix
from tests.oracles.peft import Oracle
from tests.worlds.adapters import ADAPTERS, AdapterFolders, save_adapter
from tests.worlds.engines import greedy, make_engine, run, tokens_of
from tests.worlds.models import save_base, token_ids

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


@dataclass
class Asked:
    """A request, and the folders whose weights it gets; () = base."""

    weights: Weights
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


class MixedWorld(AdapterFolders):
    """A base model's folder, and folders of adapters that are mixed."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.folder, self.base, self.names = folder, folder / "base", list(LISTED)
        save_base(self.base, variant)
        again = {name: {**LISTED[old], "r": 5} for old, name in AGAIN.items()}
        for seed, (name, config) in enumerate({**LISTED, **again}.items()):
            if variant == "phi3-fused":
                config = {**config, "target_modules": PHI3[name.removesuffix("-again")]}
            save_adapter(self.path(name), self.base, seed, **config)
        self._oracle: Oracle | None = None

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            self._oracle = Oracle(self.base)
            for name in [*self.names, *AGAIN.values()]:
                self._oracle.load(name, self.path(name))
        return self._oracle

    def mixed_in_peft(self, weights: Weights) -> str | None:
        """The name of PEFT's adapter; it is made when it is asked for first. None = base."""
        if not weights or (weights[1:] == () and weights[0][1] == 1):
            return weights[0][0] if weights else None
        from peft.tuners.lora import LoraLayer

        peft = self.oracle.peft
        name = f"mix {weights}".replace(".", "_")
        if name not in peft.peft_config:
            folders, factors = zip(*weights)
            peft.base_model.add_weighted_adapter(list(folders), list(factors), name, combination_type="cat")
            for module in peft.modules():
                # Scalings and weights are in the tensors by now. But the new adapter has `use_rslora` of the first one,
                # and PEFT would scale by the square root of the rank once more.
                if isinstance(module, LoraLayer) and name in module.scaling:
                    module.scaling[name] = 1.0
            peft.to(self.oracle.dtype).eval()
        return name

    def engine(self, **options: object) -> LLMEngine:
        return make_engine(self.base, None, {"max_lora_rank": RANK, **options})

    def check_answers(self, asked: list[Asked]) -> int:
        """Each token of each answer is what PEFT finds likeliest after the ones before. Returns how many there were."""
        for weights in {one.weights for one in asked}:
            own = [one for one in asked if one.weights == weights]
            name = self.mixed_in_peft(weights)
            for first in range(0, len(own), 32):
                group = own[first : first + 32]
                texts = [one.prompt + one.answer for one in group]
                for one, logits in zip(group, self.oracle.logits(name, texts)):
                    end = len(one.prompt) + len(one.answer) - 1
                    expected = logits[len(one.prompt) - 1 : end].argmax(-1).tolist()
                    assert one.answer == expected, (one.weights, one.prompt)
        return sum(len(one.answer) for one in asked)


def some_mixes(world: MixedWorld, rng: random.Random, count: int = 6) -> list[tuple[tuple[str, float], ...]]:
    """Names with weights, among them the same adapters with others, one adapter alone, and a weight of 0."""
    made = [(("qv", 0.7), ("all", 0.3)), (("qv", 0.3), ("all", 0.7)), (("mlp", -0.5),)]
    while len(made) < count:
        names = rng.sample(world.names, rng.randint(2, 3))
        made.append(tuple((name, rng.choice([0, 1, -0.4, round(rng.uniform(0.1, 2), 3)])) for name in names))
    return made


def serve(
    world: MixedWorld, engine: LLMEngine, rng: random.Random, count: int, reloads: bool = True
) -> list[Asked]:
    """Requests that arrive while others run, of mixes, of their parts alone and of base; now and then a part is loaded
    again from another folder, or unloaded, while mixes of it run."""
    asked: dict[str, Asked] = {}
    folders, finished = {name: name for name in world.names}, {}
    prefixes = [token_ids(rng.randint(4, 20), seed) for seed in range(3)]
    mixes = some_mixes(world, rng)

    def part(name: str, **changes: object) -> LoRARequest:
        return world.request(name, lora_path=str(world.path(folders[name])), **changes)

    for number in range(count):
        prompt = rng.choice([[], *prefixes]) + token_ids(rng.randint(1, 20), rng.randrange(10**6))
        if reloads and rng.random() < 0.15:
            name = rng.choice(list(AGAIN))
            if rng.random() < 0.3:
                engine.remove_lora(world.names.index(name) + 1)
                while engine.adapters.adapters.get(world.names.index(name) + 1):
                    finished |= {output.request_id: output for output in engine.step() if output.finished}
                folders[name] = AGAIN[name] if folders[name] == name else name
            else:
                folders[name] = AGAIN[name] if folders[name] == name else name
                weights: Weights = ((folders[name], 1),)
                asked[str(number)] = Asked(weights, prompt)
                request = part(name, load_inplace=True)
                engine.add_request(str(number), prompt, greedy(2), lora_request=request)
                continue
        weights = rng.choice([(), *[((name, 1),) for name in world.names], *mixes, *mixes])
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
        asked[str(number)] = Asked(tuple((folders[name], weight) for name, weight in weights), prompt)
        engine.add_request(str(number), prompt, greedy(rng.randint(1, 12)), lora_request=request)
        while rng.random() < 0.6:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
    finished |= run(engine)
    for key, one in asked.items():
        assert finished[key].error is None, finished[key].error
        one.answer = tokens_of(finished[key])
    return list(asked.values())


_worlds: dict[str, MixedWorld] = {}


def mixed_world(tmp_path_factory, variant: str = "llama-llama3-rope") -> MixedWorld:
    """Made once a test run."""
    if variant not in _worlds:
        _worlds[variant] = MixedWorld(tmp_path_factory.mktemp(f"mixed-{variant}"), variant)
    return _worlds[variant]
