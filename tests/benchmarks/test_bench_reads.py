"""How fast adapters are read: files are read, checked and moved, each once, whatever is measured."""

import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_engine import tiny_world

from benchmarks import reads, reads_beside


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.mark.parametrize("is_kept", (True, False))
def test_every_adapter_is_read_and_moved_once(world, monkeypatch, is_kept):
    worker = world.engine().adapters.worker
    requests = [world.request(name) for name in ("qv", "mlp", "all")]
    sizes = [os.path.getsize(Path(request.lora_path, "adapter_model.safetensors")) for request in requests]
    memory, moved = reads.Memory(2 * max(sizes), 2, is_kept), []
    move_in = memory.move_in
    monkeypatch.setattr(memory, "move_in", lambda lora: (moved.append(lora.name), move_in(lora)))
    before = torch.get_num_threads()

    row = reads.read_all(worker, requests, memory, threads=2)

    assert sorted(moved) == ["all", "mlp", "qv"]
    assert row["adapters_per_second"] > 0 and row["load_max_ms"] >= row["load_p50_ms"] > 0
    assert len(memory.free) == (2 if is_kept else 0)
    assert torch.get_num_threads() == before


def test_beside_steps_every_adapter_is_read_staged_and_measured(tmp_path, monkeypatch):
    staged, report = [], []
    monkeypatch.setattr(reads_beside, "RANKS", (2, 3))
    stage = reads_beside.Writer.stage
    monkeypatch.setattr(
        reads_beside.Writer, "stage", lambda self, lora: (staged.append(lora.rank), stage(self, lora))
    )
    options = SimpleNamespace(adapters=4, threads=[2], rounds=2)
    before = threading.active_count()

    reads_beside.run(options, SimpleNamespace(add=report.append), tmp_path, "tiny")

    assert Counter(staged) == {2: 12, 3: 12}, "three rounds, beside steps and alone, of two each"
    assert [row["beside"] for row in report] == ["steps", "nothing"]
    assert report[0]["step_ms"] >= reads_beside.PYTHON_MS + reads_beside.WAIT_MS and not report[1]["step_ms"]
    assert all(row["read_ms"] > 0 and row["stage_ms"] > 0 for row in report)
    assert threading.active_count() == before
