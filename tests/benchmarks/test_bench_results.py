"""The committed results: each says where, when and with what it was measured."""

import datetime
import itertools
import json
import re

import pytest

from benchmarks import layers
from benchmarks.report import RESULTS
from tests.tools.nights import by_day

ROOT = RESULTS.parents[1]
FILES = sorted(RESULTS.glob("*.json"))
# A name, or several as a shell expands them: `engine-serve-{base,many}-32-h100-2026-11-23.json`.
NAME = re.compile(r"[a-z][\w.{},-]*-20\d\d-\d\d-\d\d\.(?:json|png)")


def expanded(name):
    pieces = [piece.strip("{}").split(",") for piece in re.findall(r"\{[^{}]*\}|[^{}]+", name)]
    return {"".join(each) for each in itertools.product(*pieces)}


def test_each_result_is_cited_by_a_document_and_each_that_is_cited_is_there():
    folders = [ROOT / name for name in ("docs", "phases", "benchmarks", "deploy")]
    documents = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*.md"))]
    names = {name for path in documents for name in NAME.findall(path.read_text())}

    cited = set().union(*map(expanded, names))

    assert cited == {path.name for path in RESULTS.iterdir()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_when_and_with_which_versions_it_was_measured(path):
    text = path.read_text()
    content = json.loads(text)

    assert '"/' not in text, "a folder of the machine it was measured on"
    assert content["machine"]["device"] and content["machine"]["torch"]
    assert path.stem.endswith(f"-{datetime.date.fromisoformat(content['date'])}")
    if "-peers-" in path.stem:
        peers = {name for name in content["rows"][0] if name in ("vllm", "sglang_v1", "sglang_v2")}
        assert peers and content["options"]["peers"].keys() == peers


@pytest.mark.parametrize(
    "path", by_day(p for p in FILES if p.stem.startswith("layers-")), ids=lambda path: path.stem
)
def test_a_result_of_layers_can_be_drawn(path, tmp_path):
    layers.main(["--plot-from", str(path), "--plot", str(tmp_path / "layers.png")])

    assert (tmp_path / "layers.png").stat().st_size > 10_000
