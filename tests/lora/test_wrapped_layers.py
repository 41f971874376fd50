"""Each kind of wrapped linear against PEFT's own layers, on batches that mix adapters.

PEFT runs a module of plain linears, one for each name in a checkpoint; ours is the fused one of the same weights.
They guard the engine; no lab is graded by them, since importing PEFT takes longer than the tests of a lab may.
"""

import math

import pytest
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.vllm.utils import from_layer
from tests.oracles.backends import NaivePunica
from tests.oracles.rows import assert_rows_equal

WIDTH, NARROW = 24, 10
SHAPES = {
    "column": (WIDTH, 20),
    "row": (NARROW, 18),
    "router": (WIDTH, 5),
    "gate_proj": (WIDTH, 15),
    "up_proj": (WIDTH, 9),
    "whole_gate_up": (WIDTH, 24),
    "q_proj": (WIDTH, 24),
    "k_proj": (WIDTH, 12),
    "v_proj": (WIDTH, 12),
    "whole_qkv": (WIDTH, 48),
}
# The base linear, the linears of the checkpoint it stands for, and what wraps it.
KINDS = {
    "column": (lambda t: ColumnParallelLinear(WIDTH, 20, params_dtype=t), ["column"]),
    "row": (lambda t: RowParallelLinear(NARROW, 18, params_dtype=t), ["row"]),
    "replicated": (lambda t: ReplicatedLinear(WIDTH, 5, params_dtype=t), ["router"]),
    "merged": (
        lambda t: MergedColumnParallelLinear(WIDTH, [15, 9], params_dtype=t),
        ["gate_proj", "up_proj"],
    ),
    "merged, one adapter": (
        lambda t: MergedColumnParallelLinear(WIDTH, [15, 9], params_dtype=t),
        ["whole_gate_up"],
    ),
    "qkv": (lambda t: QKVParallelLinear(WIDTH, 6, 4, 2, params_dtype=t), ["q_proj", "k_proj", "v_proj"]),
    "qkv, one adapter": (lambda t: QKVParallelLinear(WIDTH, 6, 4, 2, params_dtype=t), ["whole_qkv"]),
}
# As saved by PEFT: what they target differs, and so do ranks and scaling.
ADAPTERS = {
    "everything": {"r": 4, "lora_alpha": 10, "target_modules": list(SHAPES)},
    "rank-stabilised": {"r": 7, "lora_alpha": 5, "use_rslora": True, "target_modules": list(SHAPES)},
    "parts": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "up_proj", "row"]},
    "patterns": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": list(SHAPES),
        "rank_pattern": {"k_proj": 8, "gate_proj": 2},
        "alpha_pattern": {"k_proj": 20, "row": 9},
    },
}
# Not in the order of their names, nor of a batch.
SLOT_OF = {"patterns": 0, "everything": 1, "parts": 3, "rank-stabilised": 4, "__base__": -1}
CONFIG = LoRAConfig(max_lora_rank=8, max_loras=5)
DTYPE = torch.float64


class CheckpointLinears(nn.Module):
    """The linears of a checkpoint side by side; each reads as many columns of x as it has inputs."""

    def __init__(self):
        super().__init__()
        for name, (width, output) in SHAPES.items():
            self.add_module(name, nn.Linear(width, output))

    def forward(self, x):
        return {name: linear(x[:, : linear.in_features]) for name, linear in self.named_children()}


@pytest.fixture(scope="module")
def peft_model():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = None
    for name, config in ADAPTERS.items():
        config = LoraConfig(**config)
        if model is None:
            model = get_peft_model(CheckpointLinears(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.to(DTYPE).eval()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def wrapped_linear(peft_model, kind):
    """The linear of the same weights, wrapped, with every adapter in its slot."""
    make, names = KINDS[kind]
    linears = peft_model.base_model.model
    base = make(DTYPE)
    base.weight.data = torch.cat([linears.get_submodule(n).base_layer.weight.detach() for n in names])
    base.bias.data = torch.cat([linears.get_submodule(n).base_layer.bias.detach() for n in names])
    layer = from_layer(base, CONFIG.max_loras, CONFIG, names)
    layer.set_mapping(NaivePunica())
    for adapter in ADAPTERS:
        lora_a, lora_b = zip(*(pair_of(linears, name, adapter) for name in names), strict=True)
        layer.set_lora(SLOT_OF[adapter], list(lora_a), list(lora_b))
    return layer


def pair_of(linears, name, adapter):
    """A, and B with the scaling in it: alpha / r, for rank-stabilised adapters alpha / sqrt(r)."""
    linear, config = linears.get_submodule(name), ADAPTERS[adapter]
    if name not in config["target_modules"]:
        return None, None
    lora_a, lora_b = linear.lora_A[adapter].weight.detach(), linear.lora_B[adapter].weight.detach()
    alpha = config.get("alpha_pattern", {}).get(name, config["lora_alpha"])
    rank = config.get("rank_pattern", {}).get(name, config["r"])
    return lora_a, lora_b * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def input_rows(kind, rows):
    x = torch.randn(rows, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    return x, x[:, : SHAPES[KINDS[kind][1][0]][0]]


@torch.no_grad()
def peft_outputs(peft_model, kind, x, adapter_names):
    outputs = peft_model(x, adapter_names=adapter_names)
    return torch.cat([outputs[name] for name in KINDS[kind][1]], dim=1)


def assert_same(actual, expected, adapters):
    """adapters: of each row"""
    labels = [f"adapter '{name}' in slot {SLOT_OF[name]}" for name in adapters]
    assert_rows_equal(actual, expected, labels=labels, tolerance=1e-13, what="outputs beside PEFT's")


def test_a_mixed_batch_gives_each_row_what_peft_gives_it(peft_model, kind):
    layer = wrapped_linear(peft_model, kind)
    generator = torch.Generator().manual_seed(1)
    names = list(SLOT_OF)
    rows = [names[i] for i in torch.randint(len(names), (40,), generator=generator)]
    x, inputs = input_rows(kind, len(rows))

    layer.punica_wrapper.token_slot_list = [SLOT_OF[name] for name in rows]
    y, _ = layer(inputs)

    assert set(rows) == set(names)
    expected = peft_outputs(peft_model, kind, x, rows)
    base = peft_outputs(peft_model, kind, x, ["__base__"] * len(rows))
    assert (expected - base).abs().max() > 0.1 * base.abs().max()
    assert_same(y, expected, rows)


def test_a_wrapped_linear_looks_like_its_base(kind):
    make, names = KINDS[kind]
    base = make(torch.float32)

    layer = from_layer(base, CONFIG.max_loras, CONFIG, names)

    assert layer.base_layer is base
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    assert (layer.input_size, layer.output_size) == (base.input_size, base.output_size)
    assert (layer.tp_size, layer.tp_rank) == (1, 0)
    assert sum(layer.output_slices) == base.output_size


def test_a_linear_without_bias_stays_without():
    base = RowParallelLinear(NARROW, 3, bias=False)

    layer = from_layer(base, CONFIG.max_loras, CONFIG, [])

    assert layer.bias is None
