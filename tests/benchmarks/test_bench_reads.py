"""How fast adapters are read: files are read, checked and moved, each once, whatever is measured."""

import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import reads, reads_beside


class Clocks:
    """Stands in for the module `time`, with clocks of each thread's own: every look at one is a millisecond later."""

    def __init__(self):
        self._own = threading.local()

    def perf_counter(self):
        return self._later("perf_counter", 0.001)

    def thread_time(self):
        return self._later("thread_time", 0.001)

    def process_time(self):
        return self._later("process_time", 0.001)

    def sleep(self, seconds):
        self._later("perf_counter", seconds)

    def _later(self, name, seconds):
        setattr(self._own, name, getattr(self._own, name, 0.0) + seconds)
        return getattr(self._own, name)


@pytest.mark.parametrize("is_kept", (True, False))
def test_every_adapter_is_read_and_moved_once(world, monkeypatch, is_kept):
    source = world.engine().adapters.worker.source
    requests = [world.request(name) for name in ("qv", "mlp", "all")]
    sizes = [os.path.getsize(Path(request.lora_path, "adapter_model.safetensors")) for request in requests]
    memory, moved = reads.Memory(2 * max(sizes), 2, is_kept), []
    move_in = memory.move_in
    monkeypatch.setattr(memory, "move_in", lambda lora: (moved.append(lora.name), move_in(lora)))
    monkeypatch.setattr(reads, "time", Clocks())
    before = torch.get_num_threads()

    row = reads.read_all(source, requests, memory, threads=2)

    assert sorted(moved) == ["all", "mlp", "qv"]
    assert row["adapters_per_second"] == pytest.approx(3 / 0.001)
    assert row["cpu_ms"] == pytest.approx(1 / 3)
    measured = [row[f"{part}_{which}_ms"] for part in ("load", "move") for which in ("p50", "max")]
    assert measured == pytest.approx([1] * 4), (
        "a look at the clock before a read, one after, one when it is moved"
    )
    assert len(memory.free) == (2 if is_kept else 0)
    assert torch.get_num_threads() == before


def test_beside_steps_every_adapter_is_read_staged_and_measured(tmp_path, monkeypatch):
    staged, report = [], []
    monkeypatch.setattr(reads_beside, "time", Clocks())
    monkeypatch.setattr(reads_beside, "PYTHON_MS", 6.5)  # between two looks at the clock
    monkeypatch.setattr(reads_beside, "RANKS", (2, 3))
    stage = reads_beside.Writer.stage
    monkeypatch.setattr(
        reads_beside.Writer, "stage", lambda self, lora: (staged.append(lora.rank), stage(self, lora))
    )
    options = SimpleNamespace(adapters=4, threads=[2], rounds=2)
    before = set(threading.enumerate())

    reads_beside.run(options, SimpleNamespace(add=report.append), tmp_path, "tiny")

    assert Counter(staged) == {2: 12, 3: 12}, "three rounds, beside steps and alone, of two each"
    assert [row["beside"] for row in report] == ["steps", "nothing"]
    # A step looks seven times until its Python is over, sleeps, and looks once more.
    assert [row["step_ms"] for row in report] == [7 + reads_beside.WAIT_MS + 1, 0]
    for row in report:  # a look before a read, one between it and staging, and one after
        assert [row[f"{part}_{clock}"] for part in ("read", "stage") for clock in ("ms", "cpu_ms")] == [1] * 4
        assert row["adapters_per_second"] == pytest.approx(4 / 0.001)
    assert set(threading.enumerate()) <= before
