"""The tile list (lab 4.1), against its definition in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from minivllm.gpu.sgmv import LoRAKernelMeta
from minivllm.gpu.sgmv.lora_kernel_metadata import build_tiles, tile_count
from tests.tools.device import DEVICE
from tests.tools.memory import random_slots
from tests.tools.watching import NewTensors

BATCHES = {
    "one row": [2],
    "one base row": [-1],
    "base only": [-1, -1, -1],
    "one adapter": [1] * 40,
    "repeated and apart": [0, 2, 0, -1, 2, 0],
    "the last slot alone": [3],
    "every slot": [3, 2, 1, 0],
}


def rows_by_slot(token_slots):
    return {
        s: [r for r, slot in enumerate(token_slots) if slot == s] for s in sorted(set(token_slots)) if s >= 0
    }


def expected_tiles(token_slots, block_rows):
    """[(slot, its rows)] in order."""
    return [
        (slot, rows[start : start + block_rows])
        for slot, rows in rows_by_slot(token_slots).items()
        for start in range(0, len(rows), block_rows)
    ]


def tiles_found(rows, tiles):
    """The same, read from what was built. Tiles that are none must come last."""
    slots, firsts, lengths = tiles.tolist()
    used = sum(slot >= 0 for slot in slots)
    assert all(slot == -1 for slot in slots[used:]), f"after the last tile the slots must be -1: {slots}"
    rows = rows.tolist()
    return [(s, rows[f : f + n]) for s, f, n in zip(slots[:used], firsts[:used], lengths[:used])]


def assert_tiles(built, token_slots, block_rows):
    found, expected = tiles_found(*built), expected_tiles(token_slots, block_rows)
    for i, (mine, theirs) in enumerate(zip(found, expected)):
        assert mine == theirs, (
            f"slots of the rows: {token_slots}, {block_rows} rows a tile\n"
            f"tile {i}, expected: slot {theirs[0]}, rows {theirs[1]}\n"
            f"tile {i}, got:      slot {mine[0]}, rows {mine[1]}"
        )
    assert len(found) == len(expected), (
        f"slots of the rows: {token_slots}, {block_rows} rows a tile: got {len(found)} tiles, expected {len(expected)}"
    )


@pytest.mark.lab("4.1")
@pytest.mark.parametrize("token_slots", BATCHES.values(), ids=BATCHES.keys())
def test_every_adapter_row_is_in_one_tile_of_its_slot(token_slots):
    found = build_tiles(torch.tensor(token_slots, device=DEVICE), 4, 12, 16)

    assert_tiles(found, token_slots, 16)


@pytest.mark.lab("4.1")
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=150), st.sampled_from([1, 2, 16]))
def test_any_mixture_gives_full_tiles_in_the_order_of_slots(token_slots, block_rows):
    found = build_tiles(torch.tensor(token_slots), 7, 160, block_rows)

    assert_tiles(found, token_slots, block_rows)


@pytest.mark.lab("4.1")
def test_all_rows_are_in_the_order_with_base_rows_last():
    token_slots = random_slots(90, 5, seed=4)

    rows, _ = build_tiles(token_slots.int(), 5, 20, 16)

    assert sorted(rows.tolist()) == list(range(90)), "a row is missing, or there twice"
    base = int((token_slots < 0).sum())
    last = token_slots[rows[90 - base :]].tolist()
    assert last == [-1] * base, f"base rows must come last, but the last {base} have the slots {last}"


# On a GPU the size of their result, or the result itself, has to come back before the CPU can go on.
LOOKS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__", "__contains__"}
LOOKS |= {"nonzero", "argwhere", "unique", "unique_consecutive", "bincount", "masked_select"}


class NobodyLooks(TorchFunctionMode):
    """Fails whoever asks a tensor for a value."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        picked = args[1] if func.__name__ == "__getitem__" else None
        is_mask = isinstance(picked, torch.Tensor) and picked.dtype == torch.bool
        name = "an index by a bool mask" if is_mask else func.__name__
        assert not is_mask and name not in LOOKS, f"{name} makes the CPU wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.lab("4.1")
def test_nothing_is_asked_of_the_device():
    token_slots = random_slots(90, 5, seed=4).to(DEVICE)

    with NobodyLooks():
        rows, tiles = build_tiles(token_slots, 5, 20, 16)

    assert (rows.shape, rows.dtype, rows.device) == ((90,), torch.int64, token_slots.device)
    assert (tiles.shape, tiles.dtype, tiles.device) == ((3, 20), torch.int64, token_slots.device)


@pytest.mark.lab("4.1")
def test_all_of_it_is_made_where_the_rows_are():
    """On the device "meta", which has shapes only, as a stand-in for a GPU."""
    with NewTensors() as made:
        rows, tiles = build_tiles(torch.empty(9, dtype=torch.long, device="meta"), 4, 12, 16)

    assert (rows.device.type, tiles.device.type) == ("meta", "meta")
    assert set(made.devices) == {"meta"}, f"new tensors are made on {made.devices}"


@pytest.mark.parametrize("tokens", [1, 5, 16, 100, 512, 513, 700])
@pytest.mark.parametrize("slots", [1, 8, 40])
def test_the_launched_tiles_are_enough_for_any_mixture(tokens, slots):
    meta = LoRAKernelMeta.make(slots, 700, DEVICE)
    worst = torch.arange(tokens) % slots
    worst[slots:] = 0  # one slot long, the others with one row each

    for token_slots in (worst, random_slots(tokens, slots, base_share=0), random_slots(tokens, slots)):
        meta.prepare_tensors(token_slots)
        args = meta.meta_args(tokens, specialize_active_lora=True)
        in_use = int((args.tiles[0] >= 0).sum())
        assert tiles_found(args.rows, args.tiles) == expected_tiles(token_slots.tolist(), args.block_rows)
        assert in_use <= args.count == tile_count(tokens, slots) <= args.tiles.shape[1]


def test_a_smaller_batch_leaves_nothing_of_the_last_one():
    meta = LoRAKernelMeta.make(4, 64, DEVICE)
    meta.prepare_tensors(random_slots(64, 4, base_share=0))
    buffers = meta.rows.data_ptr(), meta.tiles.data_ptr()

    meta.prepare_tensors(torch.tensor([-1, 3]))

    args = meta.meta_args(2)
    assert tiles_found(args.rows, args.tiles) == [(3, [1])]
    assert (meta.rows.data_ptr(), meta.tiles.data_ptr()) == buffers
