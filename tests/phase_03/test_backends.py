"""The backends on whole linears, against float64 sums row by row (lab 3.6 for what all of them share)."""

import pytest
import torch
from mixed_layer import MixedLayer, make_backend, make_wrapper
from per_token import (
    assert_columns_written,
    choose,
    expanded,
    random_slots,
    random_tensor,
    shrunk,
)
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from minivllm.config import LoRAConfig
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.lora.mapping import LoRAMapping
from minivllm.vllm.punica_selector import PunicaWrapperCPU, PunicaWrapperLoops, get_punica_wrapper
from tests.oracles.rows import assert_rows_equal
from tests.tools.memory import Guarded

VOCAB = 50
# The first two run the product that a CPU serves with.
GRADED = [pytest.param(name, marks=pytest.mark.lab("3.6")) for name in ("grouped", "scattered grouped")]
ALL = [*GRADED, "loops", "op by op", "scattered loops", "scattered op by op", "auto"]


@pytest.fixture(params=ALL)
def backend(request):
    return make_backend(request.param)


@pytest.fixture(params=["loops", "grouped"])
def metadata(request):
    """A backend of which only what it knows of a step is looked at."""
    return make_wrapper(request.param)


def small_layer(backend, dtype=torch.float64, **kwargs):
    """Two slices; adapters 11 in slot 2, 12 in slot 0, slot 1 free."""
    base = MergedColumnParallelLinear(12, [9, 4], params_dtype=dtype)
    mixed = MixedLayer(backend, base, ["gate", "up"], **kwargs)
    mixed.put(2, 11, ranks=[8, 3])
    mixed.put(0, 12, ranks=[2, 5])
    return mixed


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_while_adapters_come_and_go(backend, seed):
    """Five steps on one layer: slots filled, emptied and swapped in between, every mix of rows."""
    mixed = MixedLayer.random(backend, seed)
    next_id = 1

    for _ in range(5):
        for slot in range(mixed.slots):
            if choose(mixed.generator, [True, False]):
                mixed.put(slot, next_id)
                next_id += 1
            elif choose(mixed.generator, [True, False, False]):
                mixed.clear(slot)
        taken = [slot for slot in range(mixed.slots) if mixed.table[slot] is not None]
        rows = random_slots(mixed.generator, choose(mixed.generator, [1, 2, 6, 19]), len(taken))
        ids = [0 if row < 0 else mixed.table[taken[row]] for row in rows]
        x = mixed.inputs(len(ids))

        mixed.step(ids)
        y = mixed.assert_answers(x, ids, 1e-12)

        base_rows = [row for row, adapter_id in enumerate(ids) if not adapter_id]
        assert_rows_equal(y[base_rows], mixed.base_output(x)[base_rows], what="base rows")


@pytest.mark.parametrize(
    "ids",
    [[0], [11], [0, 0, 11], [11, 0], [12, 0, 12, 0], [11, 12, 11, 0, 12, 12, 0, 11], [0, 12, 11, 11, 0]],
)
def test_base_rows_are_untouched(backend, ids):
    """INCIDENTS 1: bit for bit what the base layer gives them, whatever shares the batch."""
    mixed = small_layer(backend)
    x = mixed.inputs(len(ids))

    mixed.step(ids)
    y = mixed.run(x)

    same = [torch.equal(row, plain) for row, plain in zip(y, mixed.base_output(x), strict=True)]
    wanted = [not adapter_id for adapter_id in ids]
    assert same == wanted, f"adapters of the rows: {ids}; rows that are the base layer's: {same}"


class UntouchedSlots:
    """Slots of a linear in a step that has no use for them."""

    def __getattr__(self, name):
        pytest.fail(
            f"no row has an adapter, and `slots.{name}` was looked at: the base output is all there is"
        )


@pytest.mark.lab("3.6")
def test_a_batch_without_adapters_pays_for_nothing_but_the_base_layer():
    mixed = small_layer(make_backend("grouped"))
    x = mixed.inputs(3)
    mixed.step([0, 0, 0])

    y = mixed.punica.linear(x, mixed.base, UntouchedSlots())

    assert_rows_equal(y, mixed.base_output(x), what="base rows")


@pytest.mark.lab("3.6")
def test_each_run_is_multiplied_by_its_own_adapter_alone():
    """Counted by PyTorch, which leaves out products in place.

    12 columns in, 9 and 4 out; adapter 11 has ranks 8 and 3, adapter 12 has 2 and 5.
    """
    mixed = small_layer(make_backend("grouped"))
    ids = [0, 12, 12, 11, 11, 11]
    x = mixed.inputs(len(ids))
    mixed.step(ids)
    of_base, of_all = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with of_base:
        mixed.base.forward(x)

    with of_all:
        mixed.run(x)

    a_row = {
        a: sum(r * (12 + n) for r, n in zip(ranks, (9, 4))) for a, ranks in {11: (8, 3), 12: (2, 5)}.items()
    }
    least = 2 * (2 * a_row[12] + 3 * a_row[11])  # a product is a multiplication and an addition
    made = of_all.get_total_flops() - of_base.get_total_flops()
    assert made <= least, (
        f"the products of 2 rows of adapter 12 and 3 of adapter 11 take {least} operations, not {made}"
    )


@pytest.mark.lab("3.6")
@pytest.mark.parametrize("lora_dtype", ["float64", "bfloat16"])
def test_slots_of_another_precision_are_left_to_add(lora_dtype):
    backend = make_backend("grouped")
    mixed = small_layer(backend, torch.float32, lora_dtype=lora_dtype)
    ids, added = [11, 0, 12, 12, 11], []
    x = mixed.inputs(len(ids))
    mixed.step([*ids, 0, 12])  # a captured step is told of more rows than a batch has
    plain, backend.add = backend.add, lambda y, x, *rest: (added.append(len(x)), plain(y, x, *rest))

    y = mixed.run(x)

    mixed.step(ids)
    assert_rows_equal(y, mixed.run(x), tolerance=1e-5, what="the output of a step with rows to spare")
    assert added == [5, 5], f"rows that were left to add: {added}"
    mixed.assert_answers(x, ids, 1e-5 if lora_dtype == "float64" else 2**-7)


@pytest.mark.parametrize("order_seed", range(6))
def test_the_order_of_rows_does_not_change_a_row(backend, order_seed):
    """INCIDENTS 17: unsorted, repeated and non-contiguous adapters."""
    mixed = small_layer(backend, torch.float64)
    ids = [11, 11, 11, 12, 12, 0, 0, 0, 11, 12]
    x = mixed.inputs(len(ids))
    mixed.step(ids)
    in_order = mixed.run(x)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(order_seed)).tolist()

    mixed.step([ids[row] for row in order])
    shuffled = mixed.run(x[order])

    labels = [f"adapter {ids[row]}, row {row} in order" for row in order]
    assert_rows_equal(shuffled, in_order[order], labels=labels, tolerance=1e-12)


def test_adapters_may_swap_slots_between_steps(backend):
    """The same ids in the same rows: only the slot table has changed."""
    mixed = small_layer(backend)
    ids, x = [11, 12, 0, 12], mixed.inputs(4)
    mixed.step(ids)
    before = mixed.run(x)

    pairs = mixed.held[2], mixed.held[0]
    for slot, pair in zip((0, 2), pairs):
        mixed.layer.set_lora(slot, *([part[side] for part in pair] for side in (0, 1)))
    mixed.table = [11, None, 12]
    mixed.step(ids)

    assert_rows_equal(mixed.run(x), before, labels=mixed.labels(ids), tolerance=1e-12)


@pytest.mark.parametrize("ranks", [[0, 0], [0, 4], [6, 0]])
def test_slices_that_an_adapter_leaves_out_stay_base(backend, ranks):
    mixed = small_layer(backend)
    mixed.put(1, 13, ranks=ranks)
    ids, x = [13, 11, 13, 12], mixed.inputs(4)

    mixed.step(ids)
    y = mixed.assert_answers(x, ids, 1e-12)

    untouched = torch.arange(13) < 9 if not ranks[0] else torch.zeros(13, dtype=torch.bool)
    untouched |= torch.arange(13) >= 9 if not ranks[1] else False
    assert torch.equal(y[::2, untouched], mixed.base_output(x)[::2, untouched])


def test_an_adapter_without_weights_for_this_layer_is_served_the_base(backend):
    mixed = small_layer(backend)
    mixed.layer.reset_lora(2)
    x = mixed.inputs(3)

    mixed.step([11, 11, 11])

    assert torch.equal(mixed.run(x), mixed.base_output(x))


def test_many_layers_share_one_backend_and_one_step(backend):
    layers = [MixedLayer.random(backend, seed) for seed in range(5)]
    slots = min(mixed.slots for mixed in layers)
    for mixed in layers:
        for slot in range(slots):
            mixed.put(slot, slot + 1)
    ids = [slots, 0, 1, 1, slots]

    layers[0].step(ids)

    for mixed in layers:
        x = mixed.inputs(len(ids))
        mixed.assert_answers(x, ids, 1e-12)


# Model and adapters: how far off the largest value a result may be.
PRECISIONS = {
    ("float32", "float32"): 1e-5,
    ("float32", "bfloat16"): 1e-5,
    ("float32", "float16"): 1e-5,
    ("float64", "float32"): 1e-12,
    ("bfloat16", "bfloat16"): 2**-6,
    ("bfloat16", "float32"): 2**-6,
    ("float16", "float16"): 2**-9,
}


@pytest.mark.parametrize("name", ["loops", "op by op", GRADED[0]])
@pytest.mark.parametrize(("model_dtype", "lora_dtype"), PRECISIONS, ids=list(map("-".join, PRECISIONS)))
def test_adapters_may_be_of_another_precision_than_the_model(name, model_dtype, lora_dtype):
    base = QKVParallelLinear(30, 4, 4, 2, params_dtype=getattr(torch, model_dtype))
    mixed = MixedLayer(make_backend(name), base, ["q", "k", "v"], lora_dtype=lora_dtype)
    for slot, adapter_id in enumerate((5, 4, 6)):
        mixed.put(slot, adapter_id, ranks=[8, 2, 0] if slot else [3, 1, 8], dtype=getattr(torch, lora_dtype))
    ids = [5, 5, 0, 4, 6, 5]
    x = mixed.inputs(len(ids))

    mixed.step(ids)
    y = mixed.assert_answers(x, ids, PRECISIONS[model_dtype, lora_dtype])

    assert y.dtype == base.weight.dtype


# Of PyTorch's functions, those that compute nothing.
VIEWS = {
    "__get__",
    "__getitem__",
    "__len__",
    "view",
    "t",
    "transpose",
    "split",
    "unbind",
    "unsqueeze",
    "squeeze",
}


class SlotReads(TorchFunctionMode):
    """Counts the operations of a pass, and the elements of slot buffers that they are given to read."""

    def __init__(self, layer):
        super().__init__()
        buffers = (*layer.lora_a_stacked, *layer.lora_b_stacked)
        self.storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        self.operations, self.elements = [], 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in VIEWS:
            self.operations.append(func.__name__)
            for tensor in (a for a in args if isinstance(a, torch.Tensor)):
                if tensor.untyped_storage().data_ptr() in self.storages:
                    self.elements += tensor.numel()
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def reads_of(mixed, x):
    with SlotReads(mixed.layer) as reads:
        mixed.layer(x)
    return reads


def test_a_batch_without_adapters_pays_for_the_base_layer_only(backend):
    mixed = small_layer(backend)
    x = mixed.inputs(3)
    mixed.step([11, 0, 12])
    assert reads_of(mixed, x).elements

    mixed.step([0, 0, 0])
    with torch.no_grad(), SlotReads(mixed.layer) as base:
        mixed.base(x)

    assert reads_of(mixed, x).operations == base.operations


@pytest.mark.lab("3.6")
def test_an_adapter_of_many_neighbouring_rows_is_read_once():
    mixed = small_layer(make_backend("grouped"))
    x = mixed.inputs(30)

    mixed.step([11] * 30)
    of_many = reads_of(mixed, x).elements
    mixed.step([11])
    of_one = reads_of(mixed, x[:1]).elements

    assert of_many == of_one > 0, f"numbers of A and B read for 30 rows: {of_many}, for one: {of_one}"


@pytest.mark.lab("3.6")
@pytest.mark.parametrize("ranks", [[4, 4, 4], [4, 1, 0]], ids=["4 4 4", "4 1 0"])
def test_a_short_adapter_does_not_pay_for_the_longest_rank(ranks):
    """Grouped: rank 4 in a slot for 64 reads at most what rank 4 needs."""
    base = QKVParallelLinear(20, 4, 4, 2, params_dtype=torch.float64)
    mixed = MixedLayer(make_backend("grouped"), base, ["q", "k", "v"], rank=64)
    mixed.put(0, 1, ranks=ranks)
    mixed.put(1, 2, ranks=[64, 64, 64])
    x = mixed.inputs(2)

    mixed.step([1, 1])
    short = reads_of(mixed, x).elements
    mixed.step([2, 2])
    longest = reads_of(mixed, x).elements

    assert 0 < short * 16 <= longest


def test_a_row_that_has_overflown_does_not_spoil_the_rows_beside_it(backend):
    mixed = small_layer(backend)
    ids = [11, 12, 0, 11, 12]
    x = mixed.inputs(len(ids))
    x[3] = float("inf")

    mixed.step(ids)
    y = mixed.run(x)

    others = [0, 1, 2, 4]
    expected = mixed.expected(x[others], [ids[row] for row in others])
    assert_rows_equal(y[others], expected, labels=mixed.labels([ids[row] for row in others]), tolerance=1e-12)


def test_a_backend_before_its_first_step_serves_the_base(backend):
    mixed = small_layer(backend)
    x = mixed.inputs(2)

    assert torch.equal(mixed.run(x), mixed.base_output(x))


def test_metadata_says_which_slot_each_token_and_each_sampled_row_has(metadata):
    mapping = LoRAMapping((8, 8, 0, 5), (8, 0))

    metadata.update_metadata(mapping, [5, None, 8], 4, VOCAB)

    assert metadata.token_lora_indices.tolist() == [2, 2, -1, 0]
    assert metadata.sampler_indices.tolist() == [2, -1]
    assert metadata.runs == [(2, slice(0, 2)), (0, slice(3, 4))]
    assert not metadata.no_lora


@pytest.mark.parametrize("ids", [(), (0,), (0, 0, 0)])
def test_a_batch_without_adapters_is_known_as_one(metadata, ids):
    metadata.update_metadata(LoRAMapping((8,), (8,)), [5, None, 8], 4, VOCAB)

    metadata.update_metadata(LoRAMapping(ids, ids), [5, None, 8], 4, VOCAB)

    assert metadata.no_lora
    assert metadata.runs == []


@pytest.mark.parametrize("mapping", [LoRAMapping((7, 8), (8,)), LoRAMapping((8, 8), (7,))])
def test_a_step_with_an_adapter_in_no_slot_is_refused_and_changes_nothing(metadata, mapping):
    metadata.update_metadata(LoRAMapping((8, 0), (0,)), [5, None, 8], 4, VOCAB)

    with pytest.raises(ValueError, match="7"):
        metadata.update_metadata(mapping, [5, None, 8], 4, VOCAB)

    assert metadata.token_lora_indices.tolist() == [2, -1]
    assert metadata.sampler_indices.tolist() == [-1]
    assert metadata.runs == [(2, slice(0, 1))]


def stacked(generator, slots=3, rank=5, width=7, sizes=(4, 6, 1)):
    """n A's (S, 1, R, K) and n B's (S, 1, N_i, R)."""
    a = tuple(random_tensor(generator, slots, 1, rank, width) for _ in sizes)
    b = tuple(random_tensor(generator, slots, 1, size, rank) for size in sizes)
    return a, b


def mapped(name, token_slots):
    punica = make_wrapper(name)
    ids = tuple(slot + 1 for slot in token_slots)
    punica.update_metadata(LoRAMapping(ids, ids), [1, 2, 3], 4, VOCAB)
    return punica


def added(x, a, b, token_slots, scale):
    parts = [
        expanded(shrunk(x, lora_a[:, 0], token_slots, scale), lora_b[:, 0], token_slots)
        for lora_a, lora_b in zip(a, b, strict=True)
    ]
    return torch.cat(parts, dim=1)


SHRINK_EXPAND = ["loops", "grouped"]
TOKEN_SLOTS = [[2], [-1, -1], [2, 0, -1, 0, 0, 1], [-1, 1, 1, -1]]


@pytest.mark.parametrize("name", SHRINK_EXPAND)
@pytest.mark.parametrize("token_slots", TOKEN_SLOTS, ids=str)
@pytest.mark.parametrize("given_buffer", [False, True])
def test_add_lora_linear_adds_to_what_is_there(name, token_slots, given_buffer):
    generator = torch.Generator().manual_seed(0)
    a, b = stacked(generator)
    x = random_tensor(generator, len(token_slots), 7)
    y = Guarded(random_tensor(generator, len(token_slots), 11))
    # A buffer may hold anything from the step before.
    buffer = torch.full((3, len(token_slots), 5), 99.0) if given_buffer else None

    mapped(name, token_slots).add_lora_linear(y.view, x, a, b, 0.5, (4, 6, 1), buffer=buffer)

    expected = y.before.double() + added(x, a, b, token_slots, 0.5)
    assert_columns_written(y, 0, expected, token_slots, 1e-5)


@pytest.mark.parametrize("name", SHRINK_EXPAND)
@pytest.mark.parametrize("token_slots", TOKEN_SLOTS, ids=str)
def test_add_shrink_fills_one_buffer_a_slice(name, token_slots):
    generator = torch.Generator().manual_seed(1)
    a, _ = stacked(generator)
    x = random_tensor(generator, len(token_slots), 7)
    buffers = tuple(Guarded(random_tensor(generator, len(token_slots), 5)) for _ in a)

    mapped(name, token_slots).add_shrink(tuple(g.view for g in buffers), x, a, 1.5)

    for guarded, lora_a in zip(buffers, a, strict=True):
        expected = shrunk(x, lora_a[:, 0], token_slots, 1.5)
        assert_columns_written(guarded, 0, expected, token_slots, 1e-5)


@pytest.mark.parametrize("name", SHRINK_EXPAND)
@pytest.mark.parametrize("token_slots", TOKEN_SLOTS, ids=str)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("add_inputs", [True, False])
def test_add_expand_writes_the_slices_side_by_side_from_its_offset(name, token_slots, offset, add_inputs):
    generator = torch.Generator().manual_seed(2)
    _, b = stacked(generator)
    x = random_tensor(generator, 3, len(token_slots), 5)
    y = Guarded(random_tensor(generator, len(token_slots), offset + 11 + 2))

    mapped(name, token_slots).add_expand(y.view, x, b, (4, 6, 1), offset, add_inputs)

    kept = y.before.double()[:, offset : offset + 11] if add_inputs else 0
    parts = [expanded(x[i], lora_b[:, 0], token_slots) for i, lora_b in enumerate(b)]
    assert_columns_written(y, offset, torch.cat(parts, dim=1) + kept, token_slots, 1e-5)


@pytest.mark.parametrize("name", SHRINK_EXPAND)
def test_half_precision_sums_stay_in_float32_until_b_has_been_applied(name):
    """Rounded only once, when y is written: half a unit in the last place of bfloat16 at most."""
    generator = torch.Generator().manual_seed(3)
    token_slots = [0, 2, 2, -1]
    a, b = (
        tuple(t.bfloat16() for t in side) for side in stacked(generator, rank=16, width=300, sizes=(40, 8, 2))
    )
    x = random_tensor(generator, 4, 300, dtype=torch.bfloat16)
    y = torch.zeros(4, 50, dtype=torch.bfloat16)

    mapped(name, token_slots).add_lora_linear(y, x, a, b, 1.0, (40, 8, 2))

    expected = added(x, a, b, token_slots, 1.0)
    error = (y.double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-6 * expected.abs().max()).all()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("loops", PunicaWrapperLoops), ("grouped", PunicaWrapperCPU), ("auto", PunicaWrapperCPU)],
)
def test_the_config_picks_the_backend(backend, expected):
    config = LoRAConfig(punica_backend=backend)

    assert type(get_punica_wrapper(8, 2, "cpu", lora_config=config)) is expected


def test_without_a_config_the_quickest_backend_is_taken():
    assert type(get_punica_wrapper(8, 2, "cpu")) is PunicaWrapperCPU


@pytest.mark.parametrize("first", ["loops", "grouped"])
@pytest.mark.parametrize("second", ["loops", "grouped", "scattered loops"])
def test_a_layer_may_be_handed_to_another_backend_with_all_it_holds(first, second):
    base = RowParallelLinear(6, 5, params_dtype=torch.float64)
    mixed = MixedLayer(make_backend(first), base, [])
    mixed.put(0, 1, ranks=[3])
    ids, x = [1, 0, 2], mixed.inputs(3)
    mixed.step([1, 0, 1])
    mixed.run(x)

    mixed.punica = make_backend(second)
    mixed.layer.set_mapping(mixed.punica)
    mixed.put(2, 2, ranks=[8])
    mixed.step(ids)

    mixed.assert_answers(x, ids, 1e-12)


@pytest.mark.parametrize("name", ["triton", "paged"])
def test_kernels_without_a_gpu_and_without_their_interpreter_are_refused_at_the_start(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    with pytest.raises(ValueError, match=f"'{name}' needs a GPU; on a CPU take grouped"):
        get_punica_wrapper(8, 2, "cpu", lora_config=LoRAConfig(punica_backend=name))
