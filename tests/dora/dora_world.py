"""A tiny base model with DoRA adapters beside plain ones, and what PEFT answers, one adapter at a time."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from minivllm import LLMEngine
from tests.oracles.peft import Oracle
from tests.worlds.adapters import ADAPTERS, AdapterFolders, save_adapter
from tests.worlds.engines import greedy, make_engine, run, tokens_of
from tests.worlds.models import save_base, token_ids

# Of the same shapes and patterns as the plain ones, and one that has other weights when it is loaded again.
DORA = {f"dora-{name}": {**config, "use_dora": True} for name, config in ADAPTERS.items()}
PHI3 = {
    "qv": ["qkv_proj"],
    "mlp": ["gate_up_proj", "down_proj"],
    "patterns": ["qkv_proj", "o_proj", "down_proj"],
}
PLAIN = ("qv", "all")
AGAIN = {"dora-qv": "dora-qv again", "dora-all": "all"}


@dataclass
class Asked:
    """A request, and the folder whose weights it gets; None = base."""

    name: str | None
    folder: str | None
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


class DoRAWorld(AdapterFolders):
    """A base model's folder, and folders of DoRA adapters and of plain ones."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.folder, self.base = folder, folder / "base"
        self.names = [*DORA, *PLAIN]
        save_base(self.base, variant)
        configs = {**DORA, **{name: ADAPTERS[name] for name in PLAIN}, "dora-qv again": DORA["dora-mlp"]}
        for seed, (name, config) in enumerate(configs.items()):
            kind = name.split(" ")[0].removeprefix("dora-")
            if variant == "phi3-fused" and kind in PHI3:
                config = {**config, "target_modules": PHI3["mlp" if "again" in name else kind]}
            save_adapter(self.path(name), self.base, seed, **config)
        self._oracle: Oracle | None = None

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            self._oracle = Oracle(self.base)
            for name in [*self.names, "dora-qv again"]:
                # A full stop or a blank is no name of a module.
                self._oracle.load(name.replace(" ", "_"), self.path(name))
        return self._oracle

    def engine(self, **options: object) -> LLMEngine:
        return make_engine(self.base, None, {"enable_dora": True, **options})

    def check_answers(self, asked: list[Asked]) -> int:
        """Each token of each answer is what PEFT finds likeliest after the ones before. Returns how many there were."""
        for folder in {one.folder for one in asked}:
            own = [one for one in asked if one.folder == folder]
            for first in range(0, len(own), 32):
                group = own[first : first + 32]
                texts = [one.prompt + one.answer for one in group]
                for one, logits in zip(group, self.oracle.logits(folder and folder.replace(" ", "_"), texts)):
                    end = len(one.prompt) + len(one.answer) - 1
                    expected = logits[len(one.prompt) - 1 : end].argmax(-1).tolist()
                    assert one.answer == expected, (one.name, one.folder, one.prompt)
        return sum(len(one.answer) for one in asked)


def serve(world: DoRAWorld, engine: LLMEngine, rng: random.Random, count: int) -> list[Asked]:
    """Requests that arrive while others run, of all adapters and base; now and then an adapter is loaded again."""
    asked: dict[str, Asked] = {}
    folders, finished = {name: name for name in world.names}, {}
    prefixes = [token_ids(rng.randint(4, 20), seed) for seed in range(4)]
    for number in range(count):
        prompt = rng.choice([[], *prefixes]) + token_ids(rng.randint(1, 20), rng.randrange(10**6))
        name = rng.choice([None, *world.names])
        request = world.request(name)
        if name is not None:
            changes = {}
            if name in AGAIN and rng.random() < 0.15:
                folders[name] = AGAIN[name] if folders[name] == name else name
                changes = {"load_inplace": True}
            request = world.request(name, lora_path=str(world.path(folders[name])), **changes)
        asked[str(number)] = Asked(name, name and folders[name], prompt)
        engine.add_request(str(number), prompt, greedy(rng.randint(1, 12)), lora_request=request)
        while rng.random() < 0.6:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
    finished |= run(engine)
    for key, one in asked.items():
        assert finished[key].error is None, finished[key].error
        one.answer = tokens_of(finished[key])
    return list(asked.values())


_worlds: dict[str, DoRAWorld] = {}


def dora_world(tmp_path_factory, variant: str = "llama-llama3-rope") -> DoRAWorld:
    """Made once a test run."""
    if variant not in _worlds:
        _worlds[variant] = DoRAWorld(tmp_path_factory.mktemp(f"dora-{variant}"), variant)
    return _worlds[variant]
