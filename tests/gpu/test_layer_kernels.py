"""The kernels of norms, activation, rotary and cache write against float64, on strided rows amid NaN."""

import pytest
import torch

from minivllm.gpu.fused import FusedRMSNorm, FusedSiluAndMul
from minivllm.gpu.kernels.activation import silu_and_mul
from minivllm.gpu.kernels.norm import fused_add_rms_norm, rms_norm
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding
from tests.tools.device import DEVICE
from tests.tools.memory import Guarded

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What one rounding of the result may cost, relative to the largest element, and float32 arithmetic before it.
ERRORS = {torch.float32: 2e-6, torch.float16: 2.0**-11 + 1e-5}
if DEVICE == "cuda":  # the interpreter computes bfloat16 wrongly
    ERRORS[torch.bfloat16] = 2.0**-8 + 1e-5


@pytest.fixture(params=ERRORS, ids=str)
def dtype(request):
    return request.param


def random(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(actual, expected):
    """Element by element, within what rounding to actual's dtype explains."""
    error = ERRORS[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=error, atol=error)


def rms(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (5, 100), (2, 4096), (7, 1)])
def test_rms_norm_of_strided_rows(dtype, rows, size):
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    x[0] *= 1e-2
    guarded = Guarded(x, device=DEVICE)

    actual = rms_norm(guarded.view, weight.to(DEVICE), 1e-3)

    assert actual.is_contiguous()
    assert_close(actual, rms(x, weight, 1e-3))


def test_rms_norm_of_heads_in_place(dtype):
    x, weight = random(4, 7, 20, dtype=dtype), random(20, dtype=dtype, seed=1)
    guarded = Guarded(x, device=DEVICE)
    heads = guarded.view[:, 2:5]  # (4, 3, 20)

    returned = rms_norm(heads, weight.to(DEVICE), 1e-6, out=heads)

    assert returned is heads
    guarded.assert_intact()
    assert_close(heads, rms(x[:, 2:5], weight, 1e-6))
    torch.testing.assert_close(guarded.view[:, [0, 1, 5, 6]].cpu(), x[:, [0, 1, 5, 6]], rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (5, 100)])
def test_fused_add_rms_norm_keeps_the_rounded_sum(dtype, rows, size):
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1, scale=4.0)
    weight = random(size, dtype=dtype, seed=2)
    guarded_x, guarded_residual = Guarded(x, device=DEVICE), Guarded(residual, gap=3, device=DEVICE)

    actual = fused_add_rms_norm(guarded_x.view, guarded_residual.view, weight.to(DEVICE), 1e-5)

    total = (x.double() + residual.double()).to(dtype)
    torch.testing.assert_close(guarded_residual.view.cpu(), total, rtol=0, atol=0)
    torch.testing.assert_close(guarded_x.view.cpu(), x, rtol=0, atol=0)
    guarded_residual.assert_intact()
    assert_close(actual, rms(total, weight, 1e-5))


# A gate of -90: exp(90) is no float32, and the kernel knows what 1 over infinity is.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1536), (5, 100), (2, 1025)])
def test_silu_and_mul_of_strided_rows(dtype, rows, width):
    gate_up = random(rows, 2 * width, dtype=dtype, scale=3.0)
    gate_up[0, 0], gate_up[0, 1] = -90.0, 90.0
    guarded = Guarded(gate_up, device=DEVICE)

    actual = silu_and_mul(guarded.view)

    gate, up = gate_up.double().chunk(2, dim=1)
    assert actual.is_contiguous()
    assert_close(actual, gate * gate.sigmoid() * up)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(4, 2, 64), (9, 3, 80), (2, 2, 96), (6, 1, 128), (3, 1, 20)]
)
def test_rotary_and_cache(dtype, num_heads, num_kv_heads, size):
    heads = random(5, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    positions = torch.tensor([0, 3, 999, 17, 4])
    slots = torch.tensor([5, 11, 2, 8, 3])
    rotary = RotaryEmbedding(size, 1000, DEFAULT_ROPE, dtype, DEVICE)
    cache = Guarded(torch.full((3, 4, 2 * num_kv_heads, size), torch.nan, dtype=dtype), 0, DEVICE)
    guarded = Guarded(heads, device=DEVICE)

    rotary_and_cache(guarded.view, *rotary(positions.to(DEVICE)), slots.to(DEVICE), cache.view)

    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, size, 2).double() / size)  # (T, D/2)
    first, second = heads.double().chunk(2, dim=2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    expected[:, num_heads + num_kv_heads :] = heads[:, num_heads + num_kv_heads :].double()
    guarded.assert_intact()
    cache.assert_intact()
    # The table's angles are float32, as transformers' are: 999 radians are off by up to 3e-5.
    actual = guarded.view.cpu()
    torch.testing.assert_close(actual.double(), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype] + 2e-4)
    written = cache.view.cpu().flatten(0, 1)
    torch.testing.assert_close(written[slots], actual[:, num_heads:], rtol=0, atol=0)
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert written[others].isnan().all()


def test_values_that_are_not_finite_are_cached_as_they_are(dtype):
    heads = random(1, 3, 64, dtype=dtype)
    heads[0, 2, 40] = torch.inf
    cache = torch.zeros(1, 4, 2, 64, dtype=dtype, device=DEVICE)
    rotary = RotaryEmbedding(64, 10, DEFAULT_ROPE, dtype, DEVICE)

    rotary_and_cache(
        heads.to(DEVICE), *rotary(torch.tensor([3], device=DEVICE)), torch.tensor([1], device=DEVICE), cache
    )

    torch.testing.assert_close(cache[0, 1, 1].cpu(), heads[0, 2], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "activation"),
    [(lambda norm: norm, SiluAndMul), (FusedRMSNorm, FusedSiluAndMul)],
    ids=["plain", "fused"],
)
def test_the_layers_compute_the_same_plain_and_fused(dtype, kind, activation):
    norm, head_norm = (kind(RMSNorm(n, 1e-5, dtype, DEVICE)) for n in (100, 20))
    norm.weight.data.copy_(random(100, dtype=dtype, seed=3))
    x, residual = random(4, 100, dtype=dtype), random(4, 100, dtype=dtype, seed=1)
    total = (x.double() + residual.double()).to(dtype)
    stream, heads = residual.to(DEVICE), random(4, 5, 20, dtype=dtype).to(DEVICE)
    expected_heads = rms(heads.cpu(), torch.ones(20), 1e-5)

    plain = norm(x.to(DEVICE))
    normed, returned = norm(x.to(DEVICE), stream)
    head_norm.norm_(heads)
    activated = activation()(x.to(DEVICE))

    weight = norm.weight.cpu()
    assert returned is stream
    torch.testing.assert_close(stream.cpu(), total, rtol=0, atol=0)
    for actual, expected in (
        (plain, rms(x, weight, 1e-5)),
        (normed, rms(total, weight, 1e-5)),
        (heads, expected_heads),
        (activated, x[:, :50].double() * x[:, :50].double().sigmoid() * x[:, 50:].double()),
    ):
        # On a CPU silu is rounded before the product.
        torch.testing.assert_close(
            actual.cpu().double(), expected, rtol=3 * ERRORS[dtype], atol=3 * ERRORS[dtype]
        )
