"""Hunt 8.12. A load of what is not there, and of a folder without an adapter."""

import shutil
from pathlib import Path

import pytest

pytest_plugins = "tests.worlds.hunts"


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_what_is_no_adapter_is_not_acknowledged(world, left):
    engine, mine = world.engine(), world.adapter(1)
    shutil.rmtree(mine.lora_path)
    if left == "an empty folder":
        Path(mine.lora_path).mkdir()

    with pytest.raises(FileNotFoundError):
        engine.add_lora(mine)
