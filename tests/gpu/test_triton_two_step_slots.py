"""Slots of which kernels use A and B apart. The oracle: products of whole matrices in float64, row by row."""

import pytest
import torch
from test_paged_attention_kernels import new_memory_is_nan

from minivllm.config import LoRAConfig
from minivllm.gpu import triton_two_step_slots
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.vllm.utils import from_layer
from tests.tools.device import DEVICE
from tests.tools.sanitizer import Sanitizer
from tests.worlds.ranks import in_lockstep

__all__ = ["new_memory_is_nan"]

K, R, HEIGHTS = 1100, 6, [24, 16]  # so wide that a shrink leaves several planes
ROWS = [1, 0, 2, 1, 0]  # the adapter of each token, 0 = base


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(number, heights):
    """Of rank 6 or 5; the second has nothing for the last slice of a fused linear."""
    r = R + 1 - number
    parts = [
        LoRALayerWeights("m", r, r, normal(r, K, seed=9 * number + i) / 30, normal(n, r, seed=5 * number + i))
        for i, n in enumerate(heights)
    ]
    return [*parts[:-1], None] if number == 2 and len(parts) > 1 else parts


def expected(x, heights):
    """(T, sum of N_i) that adapters add"""
    y = torch.zeros(len(ROWS), sum(heights), dtype=torch.float64)
    for row, number in enumerate(ROWS):
        for columns, part in zip(y[row].split(heights), adapter(number, heights) if number else []):
            if part is not None:
                columns += part.lora_b.double() @ (part.lora_a.double() @ x[row].double())
    return y


def layer_of(kind, tp, dtype=torch.float32):
    """The layer of a process, whose base gives zeros, with both adapters in its slots, and a step begun."""
    if kind == "column":
        base = MergedColumnParallelLinear(K, HEIGHTS, bias=False, params_dtype=dtype, tp=tp)
    else:
        base = RowParallelLinear(K, HEIGHTS[0], bias=False, params_dtype=dtype, tp=tp)
    base.weight.data.zero_()
    base.to(DEVICE)
    config = LoRAConfig(R, 2, fully_sharded_loras=True, lora_dtype=dtype)
    layer = from_layer(base, 2, config, ["gate", "up"] if kind == "column" else [])
    backend = TritonBackend(16, 16, DEVICE, 2)
    layer.set_mapping(backend)
    for number in (1, 2):
        layer.slots.write(number - 1, layer.share.of(adapter(number, heights_of(kind))))
    backend.begin_step(LoRAMapping(tuple(ROWS), tuple(ROWS)), [1, 2])
    return layer


def heights_of(kind):
    return HEIGHTS if kind == "column" else HEIGHTS[:1]


def run(kind, tp):
    layer = layer_of(kind, tp)
    x = normal(len(ROWS), K, seed=3)[:, layer.base_layer.columns].to(DEVICE)
    y = layer.forward(x)[0]
    y = tp.all_reduce(y) if kind == "row" else y  # terms, which the block sums that the layer ends
    return y.cpu(), layer.base_layer.rows


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("most", [0, 1 << 18])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_processes_have_what_whole_matrices_give_however_planes_travel(kind, most, monkeypatch):
    monkeypatch.setattr(triton_two_step_slots, "MOST_BYTES", most)
    whole = expected(normal(len(ROWS), K, seed=3), heights_of(kind)).split(heights_of(kind), dim=1)

    for y, rows in in_lockstep(2, lambda tp: run(kind, tp)):
        own = whole if kind == "row" else [w[:, r] for w, r in zip(whole, rows, strict=True)]
        torch.testing.assert_close(y, torch.cat(own, dim=1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter tells which kernels were launched")
@pytest.mark.parametrize("kind", ["column", "row"])
def test_all_slices_take_one_shrink_and_one_expand(kind):
    sanitizer = Sanitizer()

    def work(tp):
        layer = layer_of(kind, tp)
        x = torch.zeros(len(ROWS), K // (1 if kind == "column" else 2))
        layer.forward(x)

    with sanitizer.watching():
        in_lockstep(2, work)

    assert sorted(sanitizer.kernels) == ["_lora_expand_kernel"] * 2 + ["_lora_shrink_kernel"] * 2


def test_h_is_as_the_kernel_sums_it_though_the_slots_round():
    """h is 2049, which float16 has not: it would be 2048."""

    def work(tp):
        layer = layer_of("row", tp, torch.float16)
        (part,) = adapter(1, heights_of("row"))
        part.lora_a = torch.zeros_like(part.lora_a)
        part.lora_a[0, [0, 1, K // 2, K // 2 + 1]] = torch.tensor([2048.0, 1, 2048, 1])
        layer.slots.write(0, layer.share.of([part]))
        x = torch.ones(len(ROWS), K // 2, dtype=torch.float16, device=DEVICE)
        return layer.slots.shrink(x, layer.backend)

    for planes in in_lockstep(2, work):
        assert planes.dtype == torch.float32
        assert planes[:, 0, 0].sum(0).tolist() == [2049] + [0] * (R - 1)
