"""Slot buffers (lab 2.1), and writing and clearing one (lab 2.2)."""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.vllm.utils import from_layer
from tests.oracles.backends import NaivePunica, backends
from tests.oracles.rows import assert_rows_equal
from tests.worlds.linears import DTYPE, HIDDEN, ToyModel, random_pair, wrap

SLOTS, RANK = 3, 6
WIDTH = 10
BASE_LAYERS = {
    "row": (lambda dtype: RowParallelLinear(WIDTH, 7, params_dtype=dtype), [], [7]),
    "gate_up": (
        lambda dtype: MergedColumnParallelLinear(WIDTH, [9, 5], params_dtype=dtype),
        ["gate_proj", "up_proj"],
        [9, 5],
    ),
    "qkv": (
        lambda dtype: QKVParallelLinear(WIDTH, 3, 4, 2, params_dtype=dtype),
        ["q_proj", "k_proj", "v_proj"],
        [12, 6, 6],
    ),
}


def wrapped(kind, dtype=torch.float32, slots=SLOTS, **lora_config):
    make, parts, _ = BASE_LAYERS[kind]
    config = LoRAConfig(max_lora_rank=RANK, max_loras=slots, **lora_config)
    layer = from_layer(make(dtype), slots, config, parts)
    layer.set_mapping(NaivePunica())
    return layer


def random_adapter(kind, ranks, seed, dtype=torch.float32):
    """One pair a slice; a rank of 0 leaves the slice out. In the form that set_lora takes."""
    outputs = BASE_LAYERS[kind][2]
    pairs = [
        random_pair(WIDTH, rank, output, seed=10 * seed + i, dtype=dtype) if rank else (None, None)
        for i, (rank, output) in enumerate(zip(ranks, outputs, strict=True))
    ]
    lora_a, lora_b = ([pair[side] for pair in pairs] for side in (0, 1))
    return (lora_a, lora_b) if len(outputs) > 1 else (lora_a[0], lora_b[0])


def expected_buffers(kind, held):
    """The definition: zeros, with each slot's A in its first rows and B in its first columns.

    held: slot -> adapter
    """
    outputs = BASE_LAYERS[kind][2]
    stacked_a = [torch.zeros(SLOTS, 1, RANK, WIDTH) for _ in outputs]
    stacked_b = [torch.zeros(SLOTS, 1, output, RANK) for output in outputs]
    for slot, (lora_a, lora_b) in held.items():
        for i, (a, b) in enumerate(zip(as_list(lora_a), as_list(lora_b), strict=True)):
            for rank in range(0 if a is None else len(a)):
                stacked_a[i][slot, 0, rank] = a[rank]
                stacked_b[i][slot, 0, :, rank] = b[:, rank]
    return stacked_a, stacked_b


def as_list(weights):
    return weights if isinstance(weights, list) else [weights]


def assert_holds(layer, kind, held):
    stacked_a, stacked_b = expected_buffers(kind, held)
    for i, (a, b) in enumerate(zip(stacked_a, stacked_b)):
        assert_slots_equal(layer.lora_a_stacked[i], a, f"A of slice {i}")
        assert_slots_equal(layer.lora_b_stacked[i], b, f"B of slice {i}")
        parts = [as_list(held[slot][0])[i] if slot in held else None for slot in range(SLOTS)]
        ranks = [0 if part is None else len(part) for part in parts]
        assert layer.slots.live_ranks[i] == ranks, (
            f"live_ranks of slice {i}, slot by slot: {layer.slots.live_ranks[i]}, expected {ranks}"
        )


def assert_slots_equal(buffer, expected, what):
    """Row by row.   buffer, expected: (S, 1, rows, columns)"""
    slots, _, rows, _ = expected.shape
    labels = [f"which is row {row} of slot {slot}" for slot in range(slots) for row in range(rows)]
    assert buffer.shape == expected.shape, f"{what}: {tuple(buffer.shape)}, expected {tuple(expected.shape)}"
    assert_rows_equal(buffer.flatten(0, 2), expected.flatten(0, 2), labels=labels, what=what)


@pytest.mark.lab("2.1")
@pytest.mark.parametrize("kind", BASE_LAYERS)
@pytest.mark.parametrize("slots", [1, 4])
def test_every_slice_has_a_buffer_of_slots_for_a_and_for_b(kind, slots):
    layer = wrapped(kind, slots=slots)

    outputs = BASE_LAYERS[kind][2]
    assert layer.n_slices == len(outputs)
    assert layer.output_slices == tuple(outputs)
    assert [tuple(a.shape) for a in layer.lora_a_stacked] == [(slots, 1, RANK, WIDTH)] * len(outputs)
    assert [tuple(b.shape) for b in layer.lora_b_stacked] == [(slots, 1, n, RANK) for n in outputs]


@pytest.fixture
def nan_in_new_memory():
    """What torch.empty gives is NaN: memory that happens to be zeros hides who forgot to write it.

    torch.use_deterministic_algorithms does it, too, and imports the compiler for seconds.
    """
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.lab("2.1")
@pytest.mark.parametrize("kind", BASE_LAYERS)
def test_new_slots_are_empty(kind, nan_in_new_memory):
    layer = wrapped(kind)

    assert_holds(layer, kind, {})


@pytest.mark.lab("2.1")
def test_the_number_of_slots_is_what_was_asked_for_whatever_the_config_says():
    make, _, _ = BASE_LAYERS["row"]

    layer = from_layer(make(torch.float32), 5, LoRAConfig(max_lora_rank=RANK, max_loras=2), [])

    slots = layer.lora_a_stacked[0].shape[0], layer.lora_b_stacked[0].shape[0], len(layer.slots.live_ranks[0])
    assert slots == (5, 5, 5), f"slots of A, of B, and of live_ranks: {slots}, expected 5"


@pytest.mark.lab("2.1")
def test_slots_are_where_the_base_weight_is():
    """On the device "meta", which has shapes only, as a stand-in for a GPU."""
    base = RowParallelLinear(WIDTH, 7, device="meta")

    layer = from_layer(base, SLOTS, LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS), [])

    assert {b.device.type for b in (*layer.lora_a_stacked, *layer.lora_b_stacked)} == {"meta"}


@pytest.mark.lab("2.1")
def test_slots_are_in_the_buffers_that_were_given():
    """Who has made them, in a GPU's pool for one, goes on looking into them, and may change his list of them."""
    a, b = (
        [torch.zeros(3, 1, 2, 5), torch.zeros(3, 1, 2, 5)],
        [torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 6, 2)],
    )
    given = [*a, *b]

    slots = Slots(a, b)
    a.clear()
    b.clear()

    for buffer, kept in zip(given, (*slots.a, *slots.b), strict=True):
        assert buffer.data_ptr() == kept.data_ptr(), "slots are another buffer than the one that was given"


@pytest.mark.lab("2.1")
def test_slots_of_another_class_are_made_of_that_class():
    class Counted(Slots):
        pass

    slots = Counted.empty(2, 4, [(5, 3)], torch.float32, "cpu")

    assert type(slots) is Counted, f"Counted.empty made {type(slots).__name__}"


@pytest.mark.lab("2.1")
def test_new_slots_have_nothing_live_and_nothing_beside_them_and_share_neither():
    slots, others = (wrapped("qkv").slots for _ in range(2))

    assert [slots.live(slot) for slot in range(SLOTS)] == [[], [], []]
    assert slots.beside == others.beside == {}
    assert slots.beside is not others.beside, "one dict beside the slots of two layers"
    slots.write(1, [None, random_part(2, seed=1, height=6), None])
    assert len(slots.live(1)) == 1
    assert slots.live_ranks == [[0, 0, 0], [0, 2, 0], [0, 0, 0]], "live ranks of q, k and v, after one of k"
    assert others.live(1) == [], "what is live in one layer's slot is so in another's"


@pytest.mark.lab("2.1")
def test_every_expert_has_a_matrix_in_a_slot_and_numbers_lie_in_the_order_of_their_indices():
    slots = Slots.empty(SLOTS, RANK, [(10, 7), (7, 5)], torch.float32, "cpu", experts=4)

    matrices = [(RANK, 10), (RANK, 7), (7, RANK), (5, RANK)]
    buffers = (*slots.a, *slots.b)
    assert [tuple(buffer.shape) for buffer in buffers] == [(SLOTS, 4, n, k) for n, k in matrices]
    assert [buffer.stride() for buffer in buffers] == [(4 * n * k, n * k, k, 1) for n, k in matrices]
    assert slots.live_ranks == [[0] * SLOTS, [0] * SLOTS]


@pytest.mark.lab("2.1")
@pytest.mark.parametrize("experts", [1, 4])
def test_slices_slots_and_experts_do_not_share_memory(experts):
    """`expand` gives the right shape over the memory of one slot: every adapter would be the one written last."""
    slots = Slots.empty(SLOTS, RANK, [(10, 7), (10, 7)], torch.float32, "cpu", experts)
    numbers = torch.arange(float(4 * SLOTS * experts)).reshape(4, SLOTS, experts)

    for of_buffer, buffer in zip(numbers, (*slots.a, *slots.b)):
        for slot in range(SLOTS):
            for expert in range(experts):
                buffer[slot, expert] = of_buffer[slot, expert]

    names = ["A of slice 0", "A of slice 1", "B of slice 0", "B of slice 1"]
    for name, of_buffer, buffer in zip(names, numbers, (*slots.a, *slots.b)):
        assert_slots_equal(
            buffer.flatten(0, 1)[:, None],
            of_buffer.reshape(-1, 1, 1, 1).expand(-1, 1, *buffer.shape[2:]),
            f"{name}, in which every expert of every slot has a number of its own",
        )


def filled_slots(experts, rank=RANK, heights=(7, 1, 5)):
    """Every number another one; something is live and beside."""
    slots = Slots.empty(SLOTS, rank, [(WIDTH, height) for height in heights], torch.float64, "cpu", experts)
    for buffer in (*slots.a, *slots.b):
        buffer.copy_(torch.arange(1.0, buffer.numel() + 1).view(buffer.shape))
    slots.live_ranks = [[1, 0, rank] for _ in heights]
    slots.beside = {"bias": tuple(torch.ones(SLOTS, 1, height) for height in heights)}
    return slots


@pytest.mark.lab("2.1")
@pytest.mark.parametrize("experts", [1, 4])
def test_the_columns_of_an_adapter_are_one_piece_of_memory(experts):
    """Of any rank, in any slot."""
    slots = filled_slots(experts).by_column()

    for i, buffer in enumerate(slots.b):
        for slot in range(SLOTS):
            for rank in range(1, RANK + 1):
                columns = buffer[slot, experts - 1, :, :rank].t()
                what = f"{rank} columns of slot {slot}, slice {i}, with strides {buffer.stride()}"
                assert columns.is_contiguous(), f"{what}: they are in several pieces"
                rows = slots.a[i][slot, experts - 1, :rank]
                assert rows.is_contiguous(), (
                    f"{rank} rows of A, slot {slot}, slice {i}, are in several pieces"
                )


@pytest.mark.lab("2.1")
@pytest.mark.parametrize(("experts", "rank"), [(1, RANK), (4, RANK), (2, 1)])
def test_slots_by_column_have_the_same_contents_under_the_same_indices(experts, rank):
    slots, before = filled_slots(experts, rank), filled_slots(experts, rank)

    moved = slots.by_column()

    for side in "ab":
        for i, (now, then) in enumerate(zip(getattr(moved, side), getattr(before, side), strict=True)):
            assert now.shape == then.shape, f"{side}[{i}] is {tuple(now.shape)}, was {tuple(then.shape)}"
            assert_rows_equal(now.flatten(0, 2), then.flatten(0, 2), what=f"rows of {side}[{i}]")
            held = now.untyped_storage().nbytes()
            assert held == then.nbytes, f"{side}[{i}] keeps {held} bytes, of which it needs {then.nbytes}"
    assert moved.live_ranks == before.live_ranks
    assert moved.beside.keys() == {"bias"}
    assert [a.data_ptr() for a in moved.a] == [a.data_ptr() for a in slots.a], "another memory for A"


@pytest.mark.lab("2.1")
def test_slots_by_column_are_written_and_cleared_like_others():
    moved = Slots.empty(SLOTS, RANK, [(WIDTH, 7)], torch.float32, "cpu").by_column()
    part = random_part(4, seed=1)
    part.beside = {}

    moved.write(1, [part])

    [(columns, a, b)] = moved.live(1)
    assert columns == slice(0, 7)
    assert_rows_equal(a.t(), part.lora_a.float(), what="A")
    assert_rows_equal(b.t(), part.lora_b.float(), what="B")
    moved.clear(1)
    assert not moved.b[0].any() and moved.live(1) == []


@pytest.mark.lab("2.1")
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora_dtype", ["auto", "bfloat16", "float64"])
def test_slots_have_the_configs_dtype_or_the_models(model_dtype, lora_dtype):
    layer = wrapped("gate_up", model_dtype, lora_dtype=lora_dtype)

    expected = model_dtype if lora_dtype == "auto" else getattr(torch, lora_dtype)
    assert {b.dtype for b in (*layer.lora_a_stacked, *layer.lora_b_stacked)} == {expected}


@pytest.mark.lab("2.1")
def test_a_layer_whose_weight_was_packed_away_still_gets_slots():
    make, parts, _ = BASE_LAYERS["gate_up"]
    base = make(torch.float32)
    base.weight.data.fill_(0.5)
    base.pack()

    layer = from_layer(base, SLOTS, LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS), parts)

    layer.set_mapping(NaivePunica())
    assert_holds(layer, "gate_up", {})


@pytest.mark.lab("2.2")
@pytest.mark.parametrize(
    ("kind", "last", "ranks"),
    [
        pytest.param("row", None, [4], id="row"),
        pytest.param("gate_up", None, [6, 1], id="gate_up"),
        pytest.param("qkv", [6, 6, 6], [2, 1, 3], id="qkv, over a longer adapter"),
        pytest.param("qkv", [3, 5, 6], [4, 0, 2], id="q and v, over an adapter that has k"),
    ],
)
def test_an_adapter_fills_its_slot_and_nothing_else(kind, last, ranks):
    layer = wrapped(kind)
    adapter = random_adapter(kind, ranks, seed=1)
    if last:
        layer.set_lora(1, *random_adapter(kind, last, seed=2))

    layer.set_lora(1, *adapter)

    assert_holds(layer, kind, {1: adapter})


@pytest.mark.lab("2.2")
@pytest.mark.parametrize("kind", BASE_LAYERS)
def test_a_reset_slot_is_empty_and_the_others_keep_theirs(kind):
    layer = wrapped(kind)
    kept = random_adapter(kind, [3] * layer.n_slices, seed=1)
    layer.set_lora(0, *kept)
    layer.set_lora(1, *random_adapter(kind, [6] * layer.n_slices, seed=2))

    layer.reset_lora(1)

    assert_holds(layer, kind, {0: kept})


@pytest.mark.lab("2.2")
def test_who_asks_is_told_of_a_change_when_all_of_it_is_there():
    slots, bias, told = biased(wrapped("row").slots), torch.linspace(-1, 1, 7)[None], []
    slots.changed = lambda slot: told.append(
        (slot, slots.live_ranks[0][slot], slots.beside["bias"][0][slot, 0].tolist())
    )

    slots.write(1, [random_part(4, seed=2, bias=bias)])
    slots.clear(1)

    assert told == [(1, 4, bias[0].tolist()), (1, 0, [0.0] * 7)], (
        f"a write of rank 4 and a clear; told was (slot, live rank and bias by then): {told}"
    )


def biased(slots, height=7):
    """Slots of one slice with a table beside A and B, as an option has for biases."""
    slots.beside["bias"] = (torch.zeros(SLOTS, 1, height),)
    return slots


def random_part(rank, seed, bias=None, height=7):
    lora_a, lora_b = random_pair(WIDTH, rank, height, seed, torch.float32)
    beside = {} if bias is None else {"bias": bias}
    return LoRALayerWeights("row", rank, 1, lora_a, lora_b, scaling=1, beside=beside)


@pytest.mark.lab("2.2")
@pytest.mark.parametrize("leave", ["another with none", "nothing", "a clear"])
def test_what_an_adapter_has_beside_a_and_b_comes_and_goes_with_it(leave):
    """Else the last adapter's bias is added to the next one's rows."""
    slots, bias = biased(wrapped("row").slots), torch.linspace(-1, 1, 7)[None]
    neighbours = bias * 3

    slots.write(0, [random_part(2, 1, neighbours)])
    slots.write(1, [random_part(4, 2, bias)])

    table = slots.beside["bias"][0]
    assert_rows_equal(table[:, 0], torch.cat([neighbours, bias, torch.zeros(1, 7)]), what="biases by slot")
    if leave == "a clear":
        slots.clear(1)
    else:
        slots.write(1, [random_part(6, 3) if leave == "another with none" else None])
    left = torch.cat([neighbours, torch.zeros(2, 7)])
    assert_rows_equal(table[:, 0], left, what=f"biases by slot, after slot 1 took {leave}")


@pytest.mark.lab("2.2")
def test_every_expert_of_a_part_is_written_and_cleared():
    slots = Slots.empty(SLOTS, RANK, [(WIDTH, 7)], torch.float32, "cpu", experts=3)
    pairs = [random_pair(WIDTH, 4, 7, seed, torch.float32) for seed in range(3)]
    lora_a, lora_b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    longer = lora_a.new_ones(3, RANK, WIDTH), lora_b.new_ones(3, 7, RANK)
    slots.write(1, [LoRALayerWeights("experts", RANK, 1, *longer, scaling=1)])

    slots.write(1, [LoRALayerWeights("experts", 4, 1, lora_a, lora_b, scaling=1)])

    assert slots.live_ranks == [[0, 4, 0]]
    assert_rows_equal(slots.a[0][1, :, :4], lora_a, what="A of the experts")
    assert_rows_equal(slots.b[0][1, ..., :4], lora_b, what="B of the experts")
    assert not slots.a[0][1, :, 4:].any() and not slots.b[0][1, ..., 4:].any(), "zeros past the rank of 4"
    slots.clear(1)
    assert not slots.a[0].any() and not slots.b[0].any(), "slot 1 was cleared, and holds something"


@pytest.mark.lab("2.2")
def test_what_a_slot_holds_is_a_copy():
    layer = wrapped("row")
    lora_a, lora_b = random_adapter("row", [4], seed=1)
    before = lora_a.clone(), lora_b.clone()

    layer.set_lora(0, lora_a, lora_b)
    lora_a.zero_()
    lora_b.zero_()

    assert_holds(layer, "row", {0: before})


@pytest.mark.lab("2.2")
@pytest.mark.parametrize(
    ("last", "new"),
    [([6, 6, 6], [2, 2, 2]), ([2, 1, 2], [5, 6, 4]), ([0, 0, 0], [3, 3, 3])],
    ids=["after a longer one", "after a shorter one", "into an empty slot"],
)
def test_a_slot_whose_copy_failed_can_be_emptied(last, new):
    """The first slices have been written, and of the last one A, when its B turns out too tall."""
    layer = wrapped("qkv")
    if any(last):
        layer.set_lora(1, *random_adapter("qkv", last, seed=1))
    lora_a, lora_b = random_adapter("qkv", new, seed=2)
    lora_b[2] = torch.ones(99, new[2])

    with pytest.raises(RuntimeError):
        layer.set_lora(1, lora_a, lora_b)
    layer.reset_lora(1)

    assert_holds(layer, "qkv", {})


@pytest.mark.lab("2.2")
@pytest.mark.parametrize("backend", backends(DTYPE))
def test_a_slot_that_the_backend_has_moved_is_still_the_layers_to_write_and_to_clear(backend):
    wrapped = wrap(ToyModel(), backends(DTYPE)[backend])
    layer = wrapped.modules["layers.1.attn.o_proj"]
    lora_a, lora_b = random_pair(16, 3, HIDDEN, seed=1)
    x = random_pair(16, 1, 1, seed=2)[0]  # (1, 16)
    layer.punica_wrapper.token_slot_list = [2]

    layer.set_lora(2, *random_pair(16, 8, HIDDEN, seed=3))
    layer.set_lora(2, lora_a, lora_b)
    with_adapter, _ = layer(x)
    layer.reset_lora(2)
    emptied, _ = layer(x)

    base, _ = layer.base_layer(x)
    expected = base + x @ lora_a.T @ lora_b.T
    assert_rows_equal(with_adapter, expected, tolerance=1e-12, what="output with the adapter")
    assert_rows_equal(emptied, base, tolerance=1e-12, what="output of the emptied slot")


@pytest.mark.lab("2.2")
def test_weights_are_converted_to_the_slots_dtype():
    layer = wrapped("gate_up")
    halves = random_adapter("gate_up", [4, 2], seed=1, dtype=torch.bfloat16)

    layer.set_lora(0, *halves)

    assert_holds(layer, "gate_up", {0: tuple([w.float() for w in side] for side in halves)})


@pytest.mark.lab("2.2")
@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_as_many_pairs_as_slices_or_none(pairs):
    layer = wrapped("qkv")
    fitting = [random_pair(WIDTH, 2, output, seed=1) for output in (12, 6, 6, 6)]
    lora_a, lora_b = ([pair[side] for pair in fitting[:pairs]] for side in (0, 1))

    with pytest.raises(ValueError):
        layer.set_lora(0, lora_a, lora_b)


@pytest.mark.lab("2.2")
@pytest.mark.parametrize("kind", BASE_LAYERS)
def test_any_history_of_writes_and_resets_leaves_what_was_written_last(kind):
    generator = torch.Generator().manual_seed(0)
    layer, held = wrapped(kind), {}

    for seed in range(60):
        slot = int(torch.randint(SLOTS, (), generator=generator))
        ranks = torch.randint(RANK + 1, (layer.n_slices,), generator=generator).tolist()
        if any(ranks):
            held[slot] = random_adapter(kind, ranks, seed)
            layer.set_lora(slot, *held[slot])
        else:
            held.pop(slot, None)
            layer.reset_lora(slot)

        assert_holds(layer, kind, held)
