"""An int8 base model on several processes: parts of one process's weights, and the tokens of transformers and PEFT."""

import pytest
import torch

from minivllm.models.registry import get_model
from tests.oracles.peft import quantized_names, quantized_oracle
from tests.worlds.models import token_ids, transformers_model
from tests.worlds.ranks import engines_in_lockstep, in_lockstep, serve


@pytest.mark.parametrize("size", [2, 4])
def test_parts_are_those_of_one_processs_weights(tmp_path, size):
    transformers_model("llama-llama3-rope").save_pretrained(tmp_path)

    def quantized(tp):
        return get_model(tmp_path, torch.float32, quantization="torchao", tp=tp)

    (whole,), parts = in_lockstep(1, quantized), in_lockstep(size, quantized)

    for part in parts:
        assert quantized_names(part) == quantized_names(whole)
        for name in quantized_names(whole):
            linear, of_all = (m.get_submodule(name.removesuffix(".weight")) for m in (part, whole))
            rows = rows_of(linear)
            assert torch.equal(linear.weight.qdata, of_all.weight.qdata[rows][:, linear.columns])
            assert torch.equal(linear.weight.scale, of_all.weight.scale[rows])


def rows_of(linear):
    """Which rows of the whole weight a process has."""
    firsts = [sum(linear.heights[:i]) for i in range(len(linear.heights))]
    return [row for first, r in zip(firsts, linear.rows) for row in range(first + r.start, first + r.stop)]


@pytest.mark.parametrize(
    ("size", "fully"), [(2, False), *(pytest.param(s, True, marks=pytest.mark.nightly) for s in (2, 4))]
)
def test_tokens_are_those_of_transformers_and_peft(world, size, fully, monkeypatch):
    names = [None, "qv", "all", "mlp"]
    pairs = [(name, token_ids(5 + 3 * i, i)) for i, name in enumerate(names)]
    oracle = quantized_oracle(world.base, {name: world.path(name) for name in names[1:]})
    options = {"dtype": "float32", "quantization": "torchao", "max_loras": 3, "fully_sharded_loras": fully}

    answers = engines_in_lockstep(
        monkeypatch, size, lambda tp: serve(world.engine(**options), world, pairs, 6)
    )

    assert answers == [[oracle.greedy(name, prompt, 6) for name, prompt in pairs]] * size
