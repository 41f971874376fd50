"""An engine with a running batch, and malformed adapters by the thousand.

    python tests/sources/malformed.py --adapters 10000 --seed 0

Each adapter is a good one that was spoiled at random (malformed_adapters.py), and a request names it. It must be
refused with ValueError or FileNotFoundError, in one sentence, within a second (ten, as the machine may be busy) and
within 256 MB or twice its files; the engine must be as before, and whoever runs must get the tokens that they get
without. Where the spoiling did no harm the adapter is served, and nothing is asked but that all goes on.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm import tqdm

from minivllm import LLMEngine, LoRARequest
from tests.tools.limits import OutOfTime, Peak, TimeLimit, limit_memory
from tests.worlds.engines import TinyWorld, greedy, snapshot, tokens_of
from tests.worlds.malformed_adapters import CONFIG, WAYS
from tests.worlds.models import character_tokenizer

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
BATCH = {"base": None, "first": "qv", "second": "all"}
SECONDS, BYTES, CHARACTERS = 10.0, 256 * 2**20, 500
BAD = 99


@dataclass
class Report:
    """outcomes   (way, what became of the adapter) -> how often
    faults     what must not happen, as text
    answers    how many were compared
    """

    outcomes: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: int = 0

    @property
    def totals(self) -> Counter:
        totals = Counter()
        for (_, outcome), count in self.outcomes.items():
            totals[outcome] += count
        return totals

    def lines(self) -> list[str]:
        totals = self.totals
        lines = [
            f"{sum(totals.values())} adapters: {dict(totals.most_common())}; {self.answers} answers compared"
        ]
        for name in WAYS:
            found = {outcome: n for (way, outcome), n in sorted(self.outcomes.items()) if way == name}
            lines.append(f"  {name:22} {found}")
        return [*lines, f"{len(self.faults)} faults", *self.faults[:40]]


class Batch:
    """Requests that never end: whoever finished is compared and asked again."""

    def __init__(self, world: TinyWorld, engine: LLMEngine) -> None:
        self.world, self.engine = world, engine
        self.expected: dict[str, list[int]] = {}
        self.answers = 0
        self._count = 0
        for name in BATCH:
            self._ask(name)
        while len(self.expected) < len(BATCH):
            self.step()

    def _ask(self, name: str) -> None:
        self._count += 1
        request = self.world.request(BATCH[name])
        self.engine.add_request(f"{name} {self._count}", PROMPT, greedy(12), lora_request=request)

    def step(self) -> list:
        """One step; the outputs of other requests that ended. AssertionError for other tokens than without them."""
        others = []
        for output in self.engine.step():
            name = output.request_id.partition(" ")[0]
            if output.finished and name in BATCH:
                assert output.error is None, f"{name}: {output.error}"
                tokens = tokens_of(output)
                assert tokens == self.expected.setdefault(name, tokens), f"{name} has other tokens"
                self.answers += 1
                self._ask(name)
            elif output.finished:
                others.append(output)
        return others


class Attack:
    """Malformed adapters against one engine.

    limit   seconds after which one of them is given up; what is to be found out may be that it hangs
    """

    def __init__(self, folder: Path, seed: int, limit: float = 30) -> None:
        self.world = TinyWorld(folder / "world", "llama-llama3-rope")
        self.disk, self.seed, self.limit = folder, seed, limit
        self.report = Report()
        self._start()

    def _start(self) -> None:
        options = {"lora_extra_vocab_size": 4, "bias_enabled": True, "max_loras": 3, "max_cpu_loras": 5}
        self.engine = self.world.engine(character_tokenizer(), **options)
        self.batch = Batch(self.world, self.engine)
        self.engine.add_lora(self.world.request("qv"))

    def run(self, numbers: Iterable[int]) -> Report:
        for number in numbers:
            self.one(number)
        self.report.answers = self.batch.answers
        return self.report

    def one(self, number: int) -> None:
        """A good adapter is spoiled and asked for; or asked for, and spoiled before it is read."""
        rng = random.Random(f"{self.seed}/{number}")
        way = rng.choice([*WAYS])
        folder = self.disk / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.world.path(rng.choice(["qv", "all", "patterns"])), folder)
        is_late = rng.random() < 0.15
        if not is_late:
            WAYS[way](rng, folder)
        request = LoRARequest(**_odd_request(rng, folder))

        outcome = self._watched(f"{way} {number}", lambda: self._ask(request))
        if outcome == "served":
            if is_late:
                WAYS[way](rng, folder)
            outcome = self._watched(f"{way} {number}", self._serve)
        self.report.outcomes[way, outcome] += 1
        try:
            self.batch.step()
        except (Exception, OutOfTime) as error:
            self.report.faults.append(f"{way} {number}: the batch failed: {error!r}")
            self._start()

    def _watched(self, what: str, call: Callable[[], tuple[str, str]]) -> str:
        """What became of the adapter. Everything but service is judged: what it said, took, and left behind."""
        before, peak, started = snapshot(self.engine), Peak(), time.perf_counter()
        try:
            with TimeLimit(self.limit):
                outcome, sentence = call()
        except (ValueError, FileNotFoundError) as error:
            outcome, sentence = type(error).__name__, str(error)
        except (Exception, OutOfTime) as error:
            outcome, sentence = f"! {type(error).__name__}", str(error)
        seconds, growth = time.perf_counter() - started, peak.growth()
        if outcome == "served":
            return outcome
        is_as_before = outcome == "failed alone" or before == snapshot(self.engine)
        size = sum(path.lstat().st_blocks * 512 for path in (self.disk / "adapter").rglob("*"))
        faults = {
            f"raised {outcome}: {sentence[:200]!r}": outcome.startswith("!"),
            f"took {seconds:.2f} s: {sentence[:100]!r}": seconds > SECONDS,
            f"took {growth / 2**20:.0f} MB: {sentence[:100]!r}": growth > max(BYTES, 2 * size),
            f"has {len(sentence)} characters": len(sentence) > CHARACTERS,
            f"cannot be printed: {sentence[:200]!r}": not sentence.isprintable(),
            "changed the engine": not is_as_before,
        }
        self.report.faults += [f"{what}: {fault}" for fault, is_there in faults.items() if is_there]
        if not is_as_before:
            self._start()
        return outcome

    def _ask(self, request: LoRARequest) -> tuple[str, str]:
        self.engine.add_request("bad", PROMPT, greedy(3), lora_request=request)
        return "served", ""

    def _serve(self) -> tuple[str, str]:
        """Step until it ends. Nothing may be raised here: what only reading tells fails the request alone."""
        try:
            for _ in range(200):
                if ended := self.batch.step():
                    self.engine.remove_lora(BAD)
                    return ("failed alone", ended[0].error) if ended[0].error else ("served", "")
        except Exception as error:
            return f"! {type(error).__name__} at a step", str(error)
        return "! never ended", ""


def _odd_request(rng: random.Random, folder: Path) -> dict:
    """Mostly plain; sometimes with a name or a path that is odd itself."""
    names = ["bad"] * 20 + ["b\x1b[31md", "b\nd", "\ud800", "é" * 300, "x" * 1_000_000, "\u202e"]
    paths = [str(folder)] * 100 + [
        str(folder / CONFIG),
        "/a\0b",
        "/" + "x" * 5000,
        "/" + "a/" * 50_000,
        "/\x1b[2J\n",
    ]
    return {"lora_name": rng.choice(names), "lora_int_id": BAD, "lora_path": rng.choice(paths)}


def attack(numbers: Iterable[int], seed: int, limit: float) -> Report:
    """By adapters of these numbers. The process gets no more memory after it, so it is one that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        attacker = Attack(Path(folder), seed, limit)
        limit_memory(6)
        return attacker.run(numbers)


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=30, help="seconds until one adapter is given up")
    parser.add_argument("--first", type=int, default=0, help="number of the first adapter")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    numbers = tqdm(range(options.first, options.first + options.adapters), mininterval=10)
    report = attack(numbers, options.seed, options.limit)
    print("\n".join(report.lines()))
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
