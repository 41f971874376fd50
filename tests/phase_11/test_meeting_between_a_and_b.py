"""Where fully sharded processes meet (lab 11.2). The oracle: products of whole matrices in float64, row by row."""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.vllm.utils import from_layer
from tests.oracles.toy_backend import ToyBackend
from tests.worlds.ranks import in_lockstep

pytestmark = pytest.mark.lab("11.2")

K, R = 12, 4
SLOTS = [0, -1, 1, 0, -1]  # of each token
T = len(SLOTS)
MAKE = {
    "column": lambda tp: ColumnParallelLinear(K, 8, bias=True, params_dtype=torch.float64, tp=tp),
    "merged": lambda tp: MergedColumnParallelLinear(K, [8, 4], params_dtype=torch.float64, tp=tp),
    "qkv": lambda tp: QKVParallelLinear(K, 2, 4, 2, params_dtype=torch.float64, tp=tp),
    "row": lambda tp: RowParallelLinear(K, 8, bias=True, params_dtype=torch.float64, tp=tp),
}
PARTS = {"column": [], "merged": ["gate", "up"], "qkv": ["q", "k", "v"], "row": []}
HEIGHTS = {"column": [8], "merged": [8, 4], "qkv": [8, 4, 4], "row": [8]}


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def adapters(kind, rank=R):
    """Two adapters, one of a lower rank; the second has nothing for the last slice of a fused linear."""
    made = []
    for number, r in enumerate((rank, rank - 1)):
        parts = [
            LoRALayerWeights("m", r, r, normal(r, K, seed=number + i), normal(n, r, seed=number - i))
            for i, n in enumerate(HEIGHTS[kind])
        ]
        made.append([*parts[:-1], None] if number and len(parts) > 1 else parts)
    return made


def expected(kind, x, slots, rank=R):
    """(T, N_i) of each slice, from whole matrices."""
    weights = [normal(n, K, seed=i) for i, n in enumerate(HEIGHTS[kind])]
    found = []
    for i, w in enumerate(weights):
        rows = []
        for token, slot in zip(x, slots, strict=True):
            y = w @ token + bias(kind, i)
            part = adapters(kind, rank)[slot][i] if slot >= 0 else None
            rows.append(y if part is None else y + part.lora_b @ (part.lora_a @ token))
        found.append(torch.stack(rows))
    return found


def bias(kind, i):
    return normal(HEIGHTS[kind][i], seed=40 + i)


def wrapped(kind, tp, rank=R):
    """The layer of a process, with its parts of the base's weights and of both adapters."""
    linear = MAKE[kind](tp)
    weights = [normal(n, K, seed=i) for i, n in enumerate(HEIGHTS[kind])]
    linear.weight.data = torch.cat([w[rows, linear.columns] for w, rows in zip(weights, linear.rows)])
    biases = torch.cat([bias(kind, i)[rows] for i, rows in enumerate(linear.rows)])
    linear.bias.data = tp.of_first(biases) if kind == "row" else biases
    config = LoRAConfig(rank, 2, fully_sharded_loras=True, lora_dtype=torch.float64)
    layer = from_layer(linear, 2, config, PARTS[kind])
    backend = ToyBackend("cpu")
    layer.set_mapping(backend)
    for slot, parts in enumerate(adapters(kind, rank)):
        layer.slots.write(slot, layer.share.of(parts))
    return layer, backend


def run(kind, tp, slots=SLOTS, rank=R):
    """(what the layer gives, of terms their sum; rows of each slice that it has; meetings)"""
    layer, backend = wrapped(kind, tp, rank)
    backend.token_lora_indices = torch.tensor(slots)
    backend.no_lora = all(slot < 0 for slot in slots)
    x = normal(len(slots), K, seed=3)
    y, more = layer.forward(x[:, layer.base_layer.columns])
    assert more is None
    return summed(kind, tp, y), layer.base_layer.rows, tp.calls


def summed(kind, tp, y):
    """As the block does that a row-parallel linear ends."""
    return tp.all_reduce(y) if kind == "row" else y


def assert_gives(kind, size, slots=SLOTS, rank=R):
    whole = expected(kind, normal(len(slots), K, seed=3), slots, rank)

    results = in_lockstep(size, lambda tp: run(kind, tp, slots, rank))

    for y, rows, _ in results:
        own = whole if kind == "row" else [w[:, r] for w, r in zip(whole, rows, strict=True)]
        torch.testing.assert_close(y, torch.cat(own, dim=1))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("size", [2, 4])
def test_every_process_has_its_part_of_the_whole_product(kind, size):
    assert_gives(kind, size)


@pytest.mark.parametrize("kind", ["column", "merged"])
def test_a_rank_that_cannot_be_divided_is_rounded_up_on_the_way_and_no_further(kind):
    assert_gives(kind, 2, rank=5)


@pytest.mark.parametrize("kind", MAKE)
def test_a_process_alone_is_the_plain_layer(kind):
    assert_gives(kind, 1)


@pytest.mark.parametrize("kind", MAKE)
def test_a_step_without_adapters_is_the_base_layers(kind):
    assert_gives(kind, 2, slots=[-1, -1])


@pytest.mark.parametrize(("kind", "slices"), [("column", 1), ("merged", 2), ("qkv", 3)])
def test_column_parallel_processes_gather_rank_sized_rows_once(kind, slices):
    for _, _, calls in in_lockstep(2, lambda tp: run(kind, tp)):
        assert calls == [("all_gather", T * slices * R // 2)]


def test_row_parallel_processes_sum_rank_sized_rows_and_then_the_output_once():
    for _, _, calls in in_lockstep(2, lambda tp: run("row", tp)):
        assert calls == [("all_reduce", T * R), ("all_reduce", T * 8)]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_step_without_adapters_costs_no_meeting_but_the_base_layers(kind):
    for _, _, calls in in_lockstep(2, lambda tp: run(kind, tp, [-1, -1])):
        assert calls == ([("all_reduce", 2 * 8)] if kind == "row" else [])


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_h_travels_as_it_was_computed_though_the_layer_rounds(kind):
    """h is (514, 512), of which B takes the difference. In bfloat16 both would be 512."""
    a, b = torch.zeros(2, K), torch.tensor([[1.0, -1.0]]).repeat(8, 1)
    a[0, [0, 1, 6, 7]] = torch.tensor([256.0, 1, 256, 1])
    a[1, [0, 6]] = 256

    def work(tp):
        linear = kind(K, 8, bias=False, params_dtype=torch.bfloat16, tp=tp)
        linear.weight.data.zero_()
        layer = from_layer(
            linear, 1, LoRAConfig(2, 1, fully_sharded_loras=True, lora_dtype=torch.bfloat16), []
        )
        backend = ToyBackend("cpu")
        layer.set_mapping(backend)
        layer.slots.write(0, layer.share.of([LoRALayerWeights("m", 2, 2, a.bfloat16(), b.bfloat16())]))
        backend.token_lora_indices, backend.no_lora = torch.tensor([0]), False
        y = layer.forward(torch.ones(1, linear.input_size_per_partition, dtype=torch.bfloat16))[0]
        return tp.all_reduce(y) if kind is RowParallelLinear else y

    for y in in_lockstep(2, work):
        assert y.dtype == torch.bfloat16
        assert y.unique().tolist() == [2]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_input_stays_as_it_was(kind):
    def work(tp):
        layer, backend = wrapped(kind, tp)
        backend.token_lora_indices, backend.no_lora = torch.tensor(SLOTS), False
        x = normal(T, K, seed=3)[:, layer.base_layer.columns]
        before = x.clone()
        layer.forward(x)
        return torch.equal(x, before)

    assert in_lockstep(2, work) == [True, True]


@pytest.mark.parametrize("kind", ["qkv", "row"])
def test_rows_may_be_fewer_than_the_step_was_made_for(kind):
    """Tokens of a captured step are padded: a backend has rows for more."""

    def work(tp):
        layer, backend = wrapped(kind, tp)
        backend.token_lora_indices, backend.no_lora = torch.tensor([*SLOTS, 1, 1]), False
        x = normal(T, K, seed=3)[:, layer.base_layer.columns]
        return summed(kind, tp, layer.forward(x)[0]), layer.base_layer.rows

    whole = expected(kind, normal(T, K, seed=3), SLOTS)
    for y, rows in in_lockstep(2, work):
        torch.testing.assert_close(y, torch.cat([w[:, r] for w, r in zip(whole, rows)], dim=1))
