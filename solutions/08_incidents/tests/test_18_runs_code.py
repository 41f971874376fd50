"""Hunt 8.18. A pickle that makes a folder when it is read."""

import os
from pathlib import Path

import pytest
import torch

pytest_plugins = "tests.worlds.hunts"


class Payload:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_reading_an_adapter_runs_nothing(world, tmp_path):
    engine, mine = world.engine(), world.adapter(1)
    (Path(mine.lora_path) / "adapter_model.safetensors").unlink()
    torch.save({"weight": Payload(tmp_path / "ran")}, Path(mine.lora_path) / "adapter_model.bin")

    with pytest.raises(ValueError):
        engine.add_lora(mine)

    assert not (tmp_path / "ran").exists()
