"""Each query of the dashboard for Grafana asks for metrics and labels that a server has."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worlds.engines import tiny_world
from tests.worlds.servers import client_of, serving
from tests.worlds.waiting import PATIENCE

BOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana.json").read_text())
QUERIES = {t["expr"]: t["legendFormat"] for panel in BOARD["panels"] for t in panel["targets"]}


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    """Metric -> its labels, of a server that has answered a request."""
    with serving(tiny_world(tmp_path_factory), "qv") as server, client_of(server) as client:
        assert list(client.completions.create(model="qv", prompt="abc", max_tokens=4, stream=True))
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(labels, query):
    metrics = re.findall(r"(?:vllm|minivllm):\w+", query)
    by = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    shown = set(re.findall(r"{{(\w+)}}", QUERIES[query]))

    assert metrics and set(metrics) <= labels.keys()
    assert (by | shown) <= set.union(*(labels[metric] for metric in metrics))


def test_the_panels_are_two_in_a_row_and_none_covers_another():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]

    assert len(set(places)) == len(places) and {x for x, _ in places} == {0, 12}
