"""What the demo shows while it works: how long it will take, and how far it is, on a terminal and in a log."""

import io
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from examples.demo import demo_requests, expected_steps, serve
from examples.serve_progress import ServeProgress, say_how_long
from tests.worlds.waiting import PATIENCE

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def some_engine(running=9, in_slots=2, seconds=0.05, on_gpu=False):
    manager = SimpleNamespace(list_active_adapters=lambda: dict.fromkeys(range(in_slots)))
    return SimpleNamespace(
        scheduler=SimpleNamespace(running=[None] * running),
        adapters=SimpleNamespace(manager=manager),
        runner=SimpleNamespace(cpu_threads="2 CPU threads", warm_up_seconds=seconds, on_gpu=on_gpu),
    )


def some_console(is_terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=width)


def serve_steps(console, steps, seconds_a_step=0.5):
    """A run of so many steps, in each of which four tokens come, and every fourth of which answers a request."""
    clock = Clock()
    with ServeProgress(some_engine(), 27, steps, console, clock) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds_a_step
            progress.advance(int(step % 4 == 0), 4)
            progress.bar.refresh()
    return console.file.getvalue()


class TestBeforehand:
    def test_it_says_about_how_long_it_will_take(self):
        console = some_console(False, width=200)

        say_how_long(console, some_engine(seconds=0.05), steps=100)

        assert console.file.getvalue().startswith("About 5 s on this machine: 100 steps of 50 ms on ")

    @pytest.mark.parametrize("engine", [some_engine(seconds=None), some_engine(on_gpu=True)])
    def test_it_says_nothing_of_what_it_does_not_know(self, engine):
        console = some_console(False)

        say_how_long(console, engine, steps=100)

        assert console.file.getvalue() == ""


class TestOnATerminal:
    @pytest.mark.parametrize("width", [80, 120])
    def test_every_step_is_shown_on_one_line_that_is_gone_afterwards(self, width):
        raw = serve_steps(some_console(True, width), 40)

        shown = [line.strip() for line in re.split(r"[\r\n]+", CONTROL.sub("", raw))]
        lines = [line for line in shown if "step 37," in line]
        assert lines
        assert lines[0].endswith("step 37, 9/27 answered, 9 running, 2 adapters in slots, 8 tokens/s")
        assert all(len(line) < width for line in shown)
        assert not any("…" in line for line in shown)
        assert raw.rstrip().endswith("\x1b[2K"), "the line is wiped"
        assert raw.count("\n") <= 1, "nothing stays above it"


class TestInALog:
    def test_there_are_plain_lines_some_seconds_apart(self):
        raw = serve_steps(some_console(False), 40)

        assert raw.splitlines() == [
            "step 10, 2/27 answered, 9 running, 2 adapters in slots, 8 tokens/s",
            "step 20, 5/27 answered, 9 running, 2 adapters in slots, 8 tokens/s",
            "step 30, 7/27 answered, 9 running, 2 adapters in slots, 8 tokens/s",
            "step 40, 10/27 answered, 9 running, 2 adapters in slots, 8 tokens/s",
        ]
        assert "\x1b" not in raw and "\r" not in raw


class Engine:
    """Answers every request two steps after it came."""

    def __init__(self) -> None:
        self.ages: dict[str, int] = {}
        self.scheduler, self.adapters = SimpleNamespace(running=[]), None

    def add_request(self, request_id, *_, **__):
        self.ages[request_id] = 0

    def has_unfinished_requests(self):
        return bool(self.ages)

    def step(self):
        self.ages = {request_id: age + 1 for request_id, age in self.ages.items()}
        ended = [request_id for request_id, age in self.ages.items() if age == 2]
        for request_id in ended:
            del self.ages[request_id]
        completion = SimpleNamespace(delta_token_ids=[1, 2])
        return [SimpleNamespace(request_id=name, finished=True, outputs=[completion]) for name in ended]


@pytest.fixture
def counts(monkeypatch):
    """A list that grows by (answers, tokens) of each step of `serve`."""
    counts = []
    monkeypatch.setattr(ServeProgress, "advance", lambda self, *of_step: counts.append(of_step))
    return counts


def test_serving_counts_its_answers_and_tokens(counts):
    requests = demo_requests(1)

    finished = serve(Engine(), requests, SimpleNamespace(max_tokens=2), Console(quiet=True))

    assert finished.keys() == {request.request_id for request in requests}
    assert [sum(column) for column in zip(*counts)] == [len(requests), 2 * len(requests)]


@pytest.mark.parametrize("per_adapter", [1, 2])
def test_the_steps_that_are_expected_are_those_that_serving_takes(counts, per_adapter):
    """Two tokens a request, and an engine that answers each request two steps after it came."""
    requests = demo_requests(per_adapter)

    serve(Engine(), requests, SimpleNamespace(max_tokens=2), Console(quiet=True))

    assert len(counts) == expected_steps(len(requests), 2)


@pytest.mark.nightly
def test_the_whole_demo_on_a_terminal(tmp_path):
    """Real terminal, real model: what it says first, shows, wipes, and says last."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "minivllm.cli", "demo", "--per-adapter", "1", "--max-tokens", "8"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--out", str(tmp_path)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"},
    )
    os.close(theirs)
    raw = b""
    while chunk := read_some(ours):
        raw += chunk

    assert process.wait(PATIENCE) == 0
    text = " ".join(CONTROL.sub("", raw.decode()).split())
    order = ["starting", "About ", "answered, ", "┃ adapter", "tokens/s on 1 CPU thread (asked for). See"]
    places = [text.find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    assert re.search(r"step \d+, \d+/11 answered, \d+ running, [012] adapters? in slots", text)


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other side is closed
        return b""
