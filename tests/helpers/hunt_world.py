"""The fixture of bug hunts; `pytest_plugins = "hunt_world"` in a file of tests brings it."""

from pathlib import Path

import pytest
from hunting import HuntWorld


@pytest.fixture
def world(tmp_path: Path) -> HuntWorld:
    """A tiny model in a folder of its own, for which adapters can be written."""
    return HuntWorld(tmp_path)
