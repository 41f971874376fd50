"""The layers on kernels of norms and activation, and rotary with its cache write, against float64 in each dtype.

In float32 `kernel_cases` has them on strided rows amid NaN.
"""

import pytest
import torch

from minivllm.gpu.fused import FusedRMSNorm, FusedSiluAndMul
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding
from tests.oracles.rotary import rotated
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


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(9, 3, 80), (6, 1, 128)])
def test_rotary_and_cache(dtype, num_heads, num_kv_heads, size):
    heads = random(5, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    positions = torch.tensor([0, 3, 999, 17, 4])
    slots = torch.tensor([5, 11, 2, 8, 3])
    rotary = RotaryEmbedding(size, 1000, DEFAULT_ROPE, dtype, DEVICE)
    cache = Guarded(torch.full((3, 4, 2 * num_kv_heads, size), torch.nan, dtype=dtype), 0, DEVICE)
    guarded = Guarded(heads, device=DEVICE)

    rotary_and_cache(guarded.view, *rotary(positions.to(DEVICE)), slots.to(DEVICE), cache.view)

    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, size, 2).double() / size)  # (T, D/2)
    expected = rotated(heads, angles[:, None], num_heads + num_kv_heads)
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
