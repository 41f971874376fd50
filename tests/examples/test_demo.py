"""`minivllm demo`, the main job, cut short: the real model, the four adapters, two slots."""

import json

import pytest

from examples.demo import ADAPTERS, run_demo


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    run_demo(max_loras=2, max_tokens=12, per_adapter=1, options={}, out=out, as_json=False)
    return {"out": out, **json.loads((out / "demo.json").read_text())}


def test_every_adapter_answers_and_not_as_the_base_does(report):
    answers = {a["adapter"]: a for a in report["answers"] if a["adapter"]}

    assert answers.keys() == set(ADAPTERS)
    assert all(a["answer"] and a["answer"] != a["base"] for a in answers.values())
    assert answers["json"]["answer"].startswith('{"customer": "')
    assert answers["sql"]["answer"].startswith("SELECT ")
    assert answers["bullets"]["answer"].startswith("- ")


def test_two_slots_serve_four_adapters_by_loading_and_evicting(report):
    assert report["trace"]["adapters"] == 4 and report["max_loras"] == 2
    assert report["trace"]["loads"] >= 4 and report["trace"]["evictions"] >= 2
    assert report["trace"]["mixed_steps"] > 0
    assert all(len([slot for slot in step["slots"] if slot]) <= 2 for step in report["steps"])


def test_the_picture_is_there(report):
    assert (report["out"] / "slots.png").read_bytes().startswith(b"\x89PNG")
    assert (report["out"] / "slots.png").stat().st_size > 20_000
