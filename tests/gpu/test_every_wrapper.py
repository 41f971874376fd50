"""Every wrapper of a linear that SURFACE.md lists, on every backend, against float64 sums row by row.

The wrappers for more ranks than one (`*WithShardedLoRA`) are among them: on one rank they answer like the plain ones.
"""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora import layers
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.vllm.punica_selector import get_punica_wrapper
from minivllm.vllm.utils import from_layer
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE

WIDTH, RANK, SLOTS = 24, 6, 4
BACKENDS = {
    "loops": torch.float64,
    "grouped": torch.float64,
    "triton": torch.float32,
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6}

# Kind of wrapper -> the base linear, made as vLLM's tests make it, and the widths of what adapters name.
KINDS = {
    "ReplicatedLinear": (lambda **o: ReplicatedLinear(WIDTH, 7, **o), [7]),
    "ColumnParallelLinear": (lambda **o: ColumnParallelLinear(WIDTH, 20, **o), [20]),
    "RowParallelLinear": (lambda **o: RowParallelLinear(WIDTH, 18, **o), [18]),
    "MergedColumnParallelLinear": (lambda **o: MergedColumnParallelLinear(WIDTH, [16, 8], **o), [16, 8]),
    "QKVParallelLinear": (lambda **o: QKVParallelLinear(WIDTH, 6, 4, 2, **o), [48]),
    "MergedQKVParallelLinear": (lambda **o: QKVParallelLinear(WIDTH, 6, 4, 2, **o), [24, 12, 12]),
    "MergedColumnParallelLinearVariableSlice": (
        lambda **o: MergedColumnParallelLinear(WIDTH, [5, 8, 11, 3], **o),
        [5, 8, 11, 3],
    ),
}
SHARDED = [
    *("ColumnParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear"),
    *("QKVParallelLinear", "MergedQKVParallelLinear"),
]
WRAPPERS = [*(f"{kind}WithLoRA" for kind in KINDS), *(f"{kind}WithShardedLoRA" for kind in SHARDED)]
# Adapter id -> rank of each part that it has, None = it leaves the part alone; over again for more parts.
ADAPTERS = {21: [4, None, 2], 22: [RANK, 1, 3], 23: [None, 5]}
TABLE = [22, None, 23, 21]
IDS = [0, 21, 23, 23, 0, 22, 21, 0]


class Wrapped:
    """One wrapped linear with three adapters, of which one may leave it alone, and a free slot.

    pairs   adapter id -> (A, B) or None for each part
    """

    def __init__(self, wrapper, backend, base, parts):
        self.dtype, self.parts = BACKENDS[backend], parts
        config = LoRAConfig(RANK, SLOTS, lora_dtype=self.dtype, punica_backend=backend)
        self.generator = torch.Generator().manual_seed(7)
        self.base = base
        for parameter in base.parameters():
            parameter.data = self.random(*parameter.shape).to(DEVICE)
        self.weight = base.weight.double().cpu().clone()
        self.bias = None if base.bias is None else base.bias.double().cpu().clone()
        self.layer = wrapper(base)
        self.layer.create_lora_weights(SLOTS, config, model_config=object())
        self.punica = get_punica_wrapper(64, 16, DEVICE, lora_config=config)
        self.layer.set_mapping(self.punica)
        self.pairs = {}
        for adapter_id, ranks in ADAPTERS.items():
            self.pairs[adapter_id] = [
                rank and (self.random(rank, WIDTH), self.random(height, rank))
                for rank, height in zip((ranks * len(parts))[: len(parts)], parts)
            ]
            self.put(adapter_id)

    def random(self, *shape):
        return torch.randn(shape, dtype=torch.float64, generator=self.generator).to(self.dtype)

    def put(self, adapter_id):
        """As the manager does: one part as it is, several packed."""
        loras = [
            pair and LoRALayerWeights(f"part_{i}", len(pair[0]), 1, *pair, scaling=1)
            for i, pair in enumerate(self.pairs[adapter_id])
        ]
        if not any(loras):
            return self.layer.reset_lora(TABLE.index(adapter_id))
        lora = PackedLoRALayerWeights.pack(loras) if len(loras) > 1 else loras[0]
        return self.layer.set_lora(TABLE.index(adapter_id), lora_a=lora.lora_a, lora_b=lora.lora_b)

    def run(self, x, ids):
        self.punica.update_metadata(LoRAMapping(ids, ids), TABLE, SLOTS + 1, 50)
        y, bias = self.layer(x.to(DEVICE))
        assert bias is None
        return y.cpu()

    def expected(self, x, ids):
        """Row by row, part by part, in float64."""
        rows = []
        for row, adapter_id in zip(x.double(), ids, strict=True):
            y = self.weight @ row if self.bias is None else self.weight @ row + self.bias
            pairs = self.pairs.get(adapter_id, [None] * len(self.parts))
            added = [
                torch.zeros(height, dtype=torch.float64)
                if pair is None
                else pair[1].double() @ (pair[0].double() @ row)
                for pair, height in zip(pairs, self.parts)
            ]
            rows.append(y + torch.cat(added))
        return torch.stack(rows)

    @torch.inference_mode()
    def assert_answers(self, ids):
        x = self.random(len(ids), WIDTH)
        expected = self.expected(x, ids)
        y = self.run(x, ids)
        assert_rows_equal(y, expected, labels=[f"adapter {i}" for i in ids], tolerance=TOLERANCE[self.dtype])


def make(name, backend):
    """The plain wrappers on linears without a bias, the sharded ones on linears with one."""
    kind, suffix = name.split("With")
    make_base, parts = KINDS[kind]
    base = make_base(bias=suffix != "LoRA", params_dtype=BACKENDS[backend], prefix=name)
    return Wrapped(getattr(layers, name), backend, base, parts)


def names_of(parts):
    return [f"part_{i}" for i in range(len(parts))] if len(parts) > 1 else ["whole"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_row_of_a_mixed_batch_gets_its_own_adapter(name, backend):
    wrapped = make(name, backend)

    wrapped.assert_answers(IDS)

    wrapped.assert_answers([0, 0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_for_each_part_of_one_adapter_over_all(backend):
    """Checkpoints with one adapter for a layer of three slices or more: one A, and a B as tall as the layer."""
    wrapped = make("MergedColumnParallelLinearVariableSliceWithLoRA", backend)
    lora_a, lora_b = wrapped.random(3, WIDTH), wrapped.random(sum(wrapped.parts), 3)

    wrapped.layer.set_lora(TABLE.index(22), lora_a, lora_b)
    wrapped.pairs[22] = [(lora_a, part) for part in lora_b.split(wrapped.parts)]

    wrapped.assert_answers(IDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fully_sharded", [False, True])
def test_from_layer_takes_the_sharded_wrapper_where_the_config_asks_for_it(kind, fully_sharded):
    make_base, parts = KINDS[kind]
    config = LoRAConfig(RANK, SLOTS, fully_sharded_loras=fully_sharded)
    expected = f"{kind}With{'Sharded' if fully_sharded and kind in SHARDED else ''}LoRA"

    wrapped = from_layer(
        make_base(), max_loras=SLOTS, lora_config=config, packed_modules_list=names_of(parts)
    )

    assert type(wrapped).__name__ == expected


@pytest.mark.parametrize("fully_sharded", [False, True])
@pytest.mark.parametrize("kind", SHARDED)
def test_of_a_linear_that_ranks_share_one_wrapper_alone_cuts_what_the_config_says(kind, fully_sharded):
    make_base, parts = KINDS[kind]
    base, config = (
        make_base(tp=TensorParallel(0, 2)),
        LoRAConfig(RANK, SLOTS, fully_sharded_loras=fully_sharded),
    )
    plain, sharded = (getattr(layers, f"{kind}With{suffix}") for suffix in ("LoRA", "ShardedLoRA"))

    answers = [wrapper.can_replace_layer(base, config, names_of(parts)) for wrapper in (plain, sharded)]

    assert answers == [not fully_sharded, fully_sharded]
    assert type(from_layer(base, SLOTS, config, names_of(parts))) is (sharded if fully_sharded else plain)


def test_a_linear_that_every_rank_has_whole_has_one_wrapper_whatever_is_sharded():
    base, config = ReplicatedLinear(WIDTH, 7, tp=TensorParallel(1, 2)), LoRAConfig(fully_sharded_loras=True)

    assert layers.ReplicatedLinearWithLoRA.can_replace_layer(base, config, [])
    assert type(from_layer(base, SLOTS, config, [])) is layers.ReplicatedLinearWithLoRA


class Halves:
    """What makes a linear a model's own kind: it computes something else."""

    def forward(self, x):
        y, _ = super().forward(x)
        return y / 2 - 1, None


class HalvedRouter(Halves, ReplicatedLinear):
    pass


class HalvedGateUp(Halves, MergedColumnParallelLinear):
    pass


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("wrapper", "base", "parts"),
    [
        (layers.ReplicatedLinearWithLoRA, lambda **o: HalvedRouter(WIDTH, 10, **o), [10]),
        (layers.MergedColumnParallelLinearWithLoRA, lambda **o: HalvedGateUp(WIDTH, [6, 4], **o), [6, 4]),
    ],
)
def test_a_models_own_kind_of_linear_is_called_whatever_it_computes(wrapper, base, parts, backend):
    base = base(params_dtype=BACKENDS[backend])
    names = [f"part_{i}" for i in range(len(parts))] if len(parts) > 1 else []
    assert wrapper.can_replace_layer(base, LoRAConfig(), names)
    wrapped = Wrapped(wrapper, backend, base, parts)
    wrapped.weight, wrapped.bias = wrapped.weight / 2, wrapped.bias / 2 - 1

    wrapped.assert_answers(IDS)


def test_a_layer_of_three_slices_is_not_taken_for_one_of_two():
    layer = MergedColumnParallelLinear(WIDTH, [5, 8, 11])
    config = LoRAConfig()

    taken_by = [
        wrapper.__name__
        for wrapper in (layers.ColumnParallelLinearWithLoRA, layers.MergedColumnParallelLinearWithLoRA)
        for parts in ([], ["whole"], ["a", "b"], ["a", "b", "c"])
        if wrapper.can_replace_layer(source_layer=layer, lora_config=config, packed_modules_list=parts)
    ]

    assert taken_by == []
    assert from_layer(layer, 2, config, ["a", "b"]) is layer
