"""The committed results: each says where, when and with what it was measured."""

import datetime
import json

import pytest

from benchmarks import layers
from benchmarks.report import RESULTS

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_when_and_with_which_versions_it_was_measured(path):
    content = json.loads(path.read_text())

    assert content["machine"]["device"] and content["machine"]["torch"]
    assert path.stem.endswith(f"-{datetime.date.fromisoformat(content['date'])}")
    if "-peers-" in path.stem:
        peers = {name for name in content["rows"][0] if name in ("vllm", "sglang_v1", "sglang_v2")}
        assert peers and content["options"]["peers"].keys() == peers


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_names_no_folder_of_the_machine_it_was_measured_on(path):
    assert '"/' not in path.read_text()


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.stem.startswith("layers-")], ids=lambda path: path.stem
)
def test_a_result_of_layers_can_be_drawn(path, tmp_path):
    layers.main(["--plot-from", str(path), "--plot", str(tmp_path / "layers.png")])

    assert (tmp_path / "layers.png").stat().st_size > 10_000
