"""The benchmark of a request's way in: every request is handed over, and one that is answered instead is told."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks import request_cost
from minivllm.serving import engine_process


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setattr(request_cost, "avoid_pauses", lambda: None)  # this process does more than serve
    monkeypatch.setattr(engine_process, "HOST", engine_process.HOST)


def test_requests_of_each_kind_are_handed_over_and_counted(tmp_path, monkeypatch):
    """By clocks that move when they are read: the loop's thread by 3 us, the process by 6."""
    path = tmp_path / "cost.json"
    thread, process = itertools.count(0, 3), itertools.count(0, 6)
    clocks = {"thread_time": lambda: next(thread) / 1e6, "process_time": lambda: next(process) / 1e6}
    monkeypatch.setattr(request_cost, "time", SimpleNamespace(**clocks))

    request_cost.main(["--at-once", "3", "--requests", "3", "--rounds", "1", "--json", str(path)])

    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["token ids", "text", "chat"]
    for row in rows:  # of each of three requests
        assert [row["cpu_us_of_the_loop"], row["cpu_us"]] == pytest.approx([1, 2])


def test_a_request_that_is_refused_ends_it(tmp_path, monkeypatch):
    refused = {"token ids": request_cost.sent("/v1/completions", {"model": "nobody", "prompt": "x"})}
    monkeypatch.setattr(request_cost, "requests", lambda: refused)

    with pytest.raises(RuntimeError, match=r"was answered.*404"):
        request_cost.main(["--at-once", "1", "--requests", "1", "--json", str(tmp_path / "cost.json")])
