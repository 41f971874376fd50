"""The layers of a base model against their definitions, and rotary positions against transformers."""

import numpy as np
import pytest
import torch

from minivllm.layers.activation import SiluAndMul
from minivllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    can_pack,
)
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding, apply_rotary, inverse_frequencies
from minivllm.models.config import ModelArchitecture
from tests.worlds.models import LLAMA3_ROPE

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def linear(inputs, outputs, bias, dtype=torch.float32):
    layer = ColumnParallelLinear(inputs, outputs, bias, dtype)
    generator = torch.Generator().manual_seed(inputs)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 8, 33, 513])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (48, 80), (576, 97)])
def test_a_packed_linear_computes_the_same_product(inputs, outputs, rows, bias):
    layer = linear(inputs, outputs, bias)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    weight, offset = layer.weight.double().numpy(), layer.bias.double().numpy() if bias else 0.0
    expected = x.double().numpy() @ weight.T + offset

    plain, _ = layer(x)
    layer.pack()
    packed, second = layer(x)

    assert second is None
    for actual in (plain, packed):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * inputs**0.5)


def test_packing_does_not_hold_the_weight_twice():
    if not can_pack():
        pytest.skip("this PyTorch has no oneDNN")
    layer = linear(48, 80, bias=True)

    layer.pack()
    layer.pack()

    assert layer.weight.numel() == 0
    assert layer.packed_weight is not None
    assert (layer.input_size, layer.output_size) == (48, 80)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_keep_their_plain_weight(dtype):
    layer = linear(48, 80, bias=False, dtype=dtype)

    layer.pack()

    assert layer.packed_weight is None
    assert layer(torch.ones(2, 48, dtype=dtype))[0].dtype == dtype


def test_fused_linears_know_their_slices():
    qkv = QKVParallelLinear(48, 20, 4, 2, bias=False)
    merged = MergedColumnParallelLinear(48, [80, 96], bias=False)

    assert (qkv.output_sizes, qkv.output_size) == ([80, 40, 40], 160)
    assert (merged.output_sizes, merged.output_size) == ([80, 96], 176)
    assert all(layer.tp_size == 1 and layer.tp_rank == 0 for layer in (qkv, merged, LinearBase(2, 3)))


def test_silu_and_mul():
    gate, up = np.random.default_rng(0).normal(size=(2, 7, 12))

    actual = SiluAndMul()(torch.from_numpy(np.concatenate([gate, up], axis=1)))

    np.testing.assert_allclose(actual, gate / (1 + np.exp(-gate)) * up, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_rms_norm_packed_or_not(dtype, tolerance):
    x, weight = np.random.default_rng(0).normal(size=(5, 3, 12)), np.linspace(0.5, 2.0, 12)
    x[2] *= 1e-3
    norm = RMSNorm(12, eps=0.05, dtype=dtype)
    norm.weight.data.copy_(torch.from_numpy(weight))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.05) * weight

    plain = norm(torch.from_numpy(x).to(dtype))
    norm.pack()
    packed = norm(torch.from_numpy(x).to(dtype))

    np.testing.assert_allclose(plain, expected, rtol=tolerance)
    np.testing.assert_allclose(packed, expected, rtol=tolerance)


@pytest.fixture(
    params=[
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3_ROPE,
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "beta_fast": 20,
            "truncate": False,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def rope(request):
    return request.param


def test_rotated_heads_equal_those_of_transformers_at_near_and_far_positions(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=96, num_attention_heads=4, rope_parameters=dict(rope))
    config.max_position_embeddings = 9000
    ours = rope_parameters_of(config)
    positions = torch.tensor([0, 1, 37, 500, 8191])
    q, k = torch.randn(2, 5, 3, 24, generator=torch.Generator().manual_seed(0))

    q_ours, k_ours = (
        apply_rotary(x, *RotaryEmbedding(24, 9000, ours, torch.float32)(positions)) for x in (q, k)
    )

    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    q_theirs, k_theirs = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(q_ours, q_theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(k_ours, k_theirs[0], rtol=0, atol=1e-6)


def test_frequencies_equal_those_of_transformers_bit_for_bit(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=96, num_attention_heads=4, rope_parameters=dict(rope))
    theirs = LlamaRotaryEmbedding(config)

    frequencies, length = inverse_frequencies(24, rope_parameters_of(config))

    assert torch.equal(frequencies, theirs.inv_freq)
    assert length == theirs.attention_scaling


def rope_parameters_of(config):
    config = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return ModelArchitecture.from_dict(config).rope_parameters


def test_angles_are_computed_in_float32_for_a_half_precision_model():
    positions = torch.tensor([1001])

    cos, sin = RotaryEmbedding(8, 2048, DEFAULT_ROPE, torch.bfloat16)(positions)

    angle = 1001 * 10000.0 ** -(np.arange(0, 8, 2) / 8)
    assert cos.dtype == sin.dtype == torch.float32
    np.testing.assert_allclose(cos[0, 0, :4], np.cos(angle), atol=1e-4)
