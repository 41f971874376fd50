"""KeyboardInterrupts at random lines of minivllm, while an LLM answers.

    python tests/engine/interrupts.py --interrupts 1000 --seed 0
    python tests/engine/interrupts.py --signals 200

A trace function raises KeyboardInterrupt at one line of a call of `generate`: every second time at any moment of it, so
that loops are hit most, else at any line that calls have come through, so that each is hit as often as another. With
`--signals` real SIGINTs are sent after random times, until so many have come before the end of a call. After each,
nothing of the call may be left in the engine, a request of somebody else that was half answered goes on, and the next
call gives the tokens of transformers + PEFT. To the last prompt of a call three answers are drawn: those of an engine
that nothing happened to.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("helpers", "models")]

import torch
from soak_checks import check_engine, check_slot_contents
from tiny_engine import TinyWorld, greedy, tokens_of

import minivllm
from minivllm import LLM, LLMEngine, RequestOutput, SamplingParams

PACKAGE = str(Path(minivllm.__file__).parent)
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 20, 21], [30, 31, 32], [5, 6, 7, 8, 40, 41, 42, 43, 44]]
LENGTH = 6
# Of the last prompt three answers are drawn; it fills a block, so the second and third wait for the first.
SEEDS = [11, 12, 13]


def drawn(**params: object) -> SamplingParams:
    return SamplingParams(temperature=1.3, max_tokens=LENGTH, ignore_eos=True, **params)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of minivllm, or when one line is come to for the n-th time.

    site    the line, as file and number; None = any
    seen    how often each line was come to
    where   the line it was raised at
    """

    def __init__(self, at: int = 0, site: tuple[str, int] | None = None) -> None:
        self.at, self.site = at, site
        self.seen: Counter[tuple[str, int]] = Counter()
        self.left = at
        self.where = ""
        self.handler = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            site = frame.f_code.co_filename, frame.f_lineno
            self.seen[site] += 1
            # With another handler Ctrl-C waits (`no_interrupts`): raised here it would leave that handler behind.
            if self.site in (None, site) and signal.getsignal(signal.SIGINT) is self.handler:
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    self.where = f"{site[0].removeprefix(PACKAGE)}:{site[1]}"
                    raise KeyboardInterrupt
        return self._line


class Attack:
    """One LLM whose calls are interrupted.

    others    a request that somebody else has in the engine: its outputs since it was added
    counts    what happened, by kind
    seconds   that the last call took which came to its end
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.world = TinyWorld(folder / "world", "llama-llama3-rope")
        self.llm: LLM = self.world.llm(max_cpu_loras=3, max_num_batched_tokens=16, max_model_len=64)
        self.counts: Counter[str] = Counter()
        self.seconds = 1.0
        self.seen: dict[tuple[str, int], int] = defaultdict(int)
        self.tenants = [None, *self.world.names]
        self.expected = {
            (tenant, row): self.world.oracle().greedy(tenant, prompt, LENGTH)
            for tenant in self.tenants
            for row, prompt in enumerate(PROMPTS)
        }
        undisturbed = self.world.llm()
        self.drawn = {
            tenant: [
                tokens_of(output)
                for output in undisturbed.generate(
                    [{"prompt_token_ids": PROMPTS[-1]}] * len(SEEDS),
                    [drawn(seed=seed) for seed in SEEDS],
                    use_tqdm=False,
                    lora_request=self.world.request(tenant),
                )
            ]
            for tenant in self.tenants
        }
        self.stranger_says = self.world.oracle().greedy("qv", PROMPTS[0], 40)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    def call(self, tenants: list[str | None]) -> list[RequestOutput]:
        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            [*[greedy(LENGTH)] * (len(PROMPTS) - 1), drawn(n=len(SEEDS), seed=SEEDS[0])],
            use_tqdm=False,
            lora_request=[self.request(tenant) for tenant in tenants],
        )

    def request(self, tenant: str | None) -> Any:
        reload = tenant == "all" and self.rng.random() < 0.3
        return self.world.request(tenant, load_inplace=reload) if tenant else None

    def pick(self) -> list[str | None]:
        return [self.rng.choice(self.tenants) for _ in PROMPTS]

    def check(self, tenants: list[str | None], outputs: list[RequestOutput]) -> None:
        for row, (tenant, output) in enumerate(zip(tenants[:-1], outputs)):
            assert tokens_of(output) == self.expected[tenant, row], f"row {row}, adapter {tenant}"
        answers = [completion.token_ids for completion in outputs[-1].outputs]
        assert answers == self.drawn[tenants[-1]], f"drawn answers, adapter {tenants[-1]}"

    def interrupter(self, number: int) -> Interrupter:
        """The next, picked by what the calls so far have come through."""
        if number % 2:
            sites = sorted(self.seen)
            site = self.rng.choice(sites)
            return Interrupter(self.rng.randint(1, self.seen[site]), site)
        return Interrupter(self.rng.randint(1, sum(self.seen.values())))

    def look(self) -> None:
        """Go through calls without interrupting them, for the lines that they come through."""
        for _ in range(5):
            with Interrupter() as counter:
                tenants = self.pick()
                self.check(tenants, self.call(tenants))
            for site, count in counter.seen.items():
                self.seen[site] = max(count, self.seen[site])

    def trial(self, interrupt: Any) -> None:
        """A call that `interrupt` cuts short, and what must be so afterwards."""
        stranger = self.rng.random() < 0.4
        if stranger:
            self.engine.add_request("stranger", PROMPTS[0], greedy(40), lora_request=self.world.request("qv"))
            heard = [o for _ in range(self.rng.randrange(4)) for o in self.engine.step()]
        pinned = self.rng.choice([None, None, 1, 2])
        if pinned in self.engine.list_loras():
            self.engine.pin_lora(pinned)
        tenants = self.pick()
        started = time.perf_counter()
        try:
            with interrupt:
                outputs = self.call(tenants)
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        else:
            self.seconds = time.perf_counter() - started
            self.counts["came to its end"] += 1
            self.check(tenants, outputs)
        sys.settrace(None)

        states = set(self.engine.output_processor.states)
        assert states <= {"stranger"}, f"left behind: {states}"
        if pinned in self.engine.list_loras():
            self.engine.unpin_lora(pinned)
        if stranger:
            self.hear_out(heard)
        else:
            tenants = self.pick()
            self.check(tenants, self.call(tenants))
        check_engine(self.engine, [])
        check_slot_contents(self.engine)

    def hear_out(self, heard: list[RequestOutput]) -> None:
        """Somebody else's request lost nothing but time: what came of it while the call ran is kept for its caller."""
        while self.engine.has_unfinished_requests():
            heard += self.engine.step()
        assert heard[-1].finished and tokens_of(heard[-1]) == self.stranger_says, "the stranger's tokens"
        pieces = [token for output in heard for token in output.outputs[0].delta_token_ids]
        assert pieces == self.stranger_says, "the stranger's tokens, as they came"


class Signal:
    """A real SIGINT after so many seconds, unless the block has ended by then."""

    def __init__(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *exc: object) -> None:
        self.timer.cancel()
        self.timer.join()
        time.sleep(0)  # a signal that was sent while the block ended arrives here


def run_attack(
    interrupts: int, seed: int = 0, signals: int = 0, prepare: Callable[[LLMEngine], None] | None = None
) -> Counter[str]:
    """Interrupt so many calls; AssertionError says at which line, and what was wrong after it.

    signals   that arrive while a call is under way; of those that come too late 99 in 100 may
    prepare   is given the engine that is attacked
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        attack = Attack(Path(folder), rng)
        if prepare is not None:
            prepare(attack.llm.llm_engine)
        attack.look()
        for number in range(interrupts):
            _try(attack, attack.interrupter(number), f"seed {seed}, interrupt {number}")
        wanted = attack.counts["interrupted"] + signals
        for number in range(100 * signals):
            if attack.counts["interrupted"] == wanted:
                break
            _try(attack, Signal(rng.uniform(0, attack.seconds)), f"seed {seed}, signal {number}")
    return attack.counts


def _try(attack: Attack, interrupt: Interrupter | Signal, what: str) -> None:
    try:
        attack.trial(interrupt)
    except Exception as error:
        raise AssertionError(f"{what} at {getattr(interrupt, 'where', 'a moment')}: {error!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=0)
    parser.add_argument("--signals", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"ok: {dict(run_attack(args.interrupts, args.seed, args.signals))}")


if __name__ == "__main__":
    main()
