"""How far serving has come, step by step: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from minivllm.assembly import LLMEngine

# Seconds between plain lines: few enough for a log, soon enough to see that it goes on.
BETWEEN_LINES = 5.0


def say_how_long(console: Console, engine: LLMEngine, steps: int) -> None:
    """About how long so many steps will take, from the one that the warm-up timed; nothing where it timed none."""
    seconds = engine.runner.warm_up_seconds
    if seconds is None or engine.runner.on_gpu:  # whose first steps say nothing of later ones
        return
    console.print(
        f"About {approximately(steps * seconds)} on this machine: {steps} steps of {seconds * 1e3:.0f} ms on "
        f"{engine.runner.cpu_threads}",
        highlight=False,
    )


def approximately(seconds: float) -> str:
    """In round numbers: `4 s`, `25 s`, `3 min`."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 5) * 5} s" if seconds < 90 else f"{round(seconds / 60)} min"


class ServeProgress:
    """Call `advance` after every step, inside `with`.

    requests   that there will be
    steps      how many it will take, about: what the bar is of
    """

    def __init__(
        self,
        engine: LLMEngine,
        requests: int,
        steps: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.requests, self.steps = engine, requests, max(1, steps)
        self.console, self.clock = console, clock
        self.step = self.answered = self.tokens = 0
        self.bar = Progress(
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.started = self.last_line = self.clock()
        self.task = self.bar.add_task(self.line(), total=self.steps)
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self, answered: int, tokens: int) -> None:
        """One more step; in it so many requests ended, and so many tokens came."""
        self.step += 1
        self.answered += answered
        self.tokens += tokens
        # A bar that is full before the end would say that it hangs.
        done = min(self.step, self.steps - 1)
        self.bar.update(self.task, completed=done, description=self.line())
        if not self.console.is_terminal and self.clock() - self.last_line >= BETWEEN_LINES:
            self.last_line = self.clock()
            self.console.print(self.line(), highlight=False, soft_wrap=True)

    def line(self) -> str:
        """`step 37, 12/27 answered, 9 running, 2 adapters in slots, 181 tokens/s`"""
        running = len(self.engine.scheduler.running)
        parts = [f"step {self.step}", f"{self.answered}/{self.requests} answered", f"{running} running"]
        if self.engine.adapters is not None:
            in_slots = len(self.engine.adapters.manager.list_active_adapters())
            parts.append(f"{in_slots} adapter{'s' * (in_slots != 1)} in slots")
        if (seconds := self.clock() - self.started) > 0 and self.tokens:
            parts.append(f"{self.tokens / seconds:.0f} tokens/s")
        return ", ".join(parts)
