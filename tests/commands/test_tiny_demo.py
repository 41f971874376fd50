"""`minivllm demo --tiny` compares two backends on a tiny model; without a GPU the demo model's kernels are refused."""

import json

import pytest

import examples.demo as demo
from minivllm.commands.tiny_demo import run_tiny_demo
from minivllm.lora.loops_backend import LoopsBackend
from tests.tools.device import interpreted

OPTIONS = {"punica_backend": "auto", "device": "auto", "dtype": "float32"}


def test_kernels_and_loops_give_the_same_tokens_which_differ_by_adapter(capsys):
    agree = run_tiny_demo(5, OPTIONS, as_json=True)

    report = json.loads(capsys.readouterr().out)
    assert agree and report["agree"]
    assert report["tokens"].keys() == {"triton", "loops"}
    rows = list(report["tokens"]["triton"].values())
    assert len(rows) == 3
    assert all(len(row) == 5 for row in rows)
    assert len(set(map(tuple, rows))) == 3, "the base and two adapters do not answer alike"


def test_tokens_that_differ_are_said_to(monkeypatch, capsys):
    add = LoopsBackend.add
    monkeypatch.setattr(LoopsBackend, "add", lambda self, y, x, slots, rows: add(self, y, -x, slots, rows))

    agree = run_tiny_demo(5, OPTIONS, as_json=False)

    assert not agree
    assert "The tokens differ." in capsys.readouterr().out


@interpreted
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_the_demo_refuses_kernels_without_a_gpu_before_the_model_is_read(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "demo_model_path", lambda: pytest.fail("the model was asked for"))

    with pytest.raises(ValueError, match=f"--punica {backend} needs a GPU.*minivllm demo --tiny"):
        demo.run_demo(2, 4, 1, {"punica_backend": backend, "device": "auto"}, tmp_path / "out", as_json=True)
