"""How fast adapters are read: files are read, checked and moved, each once, whatever is measured."""

import os
from pathlib import Path

import pytest
import torch
from tiny_engine import tiny_world

from benchmarks import reads


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
