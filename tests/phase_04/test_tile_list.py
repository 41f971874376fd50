"""The tile list (lab 4.1), against its definition in plain Python."""

import pytest
import torch
from gpu import DEVICE
from guarded import random_slots
from hypothesis import given
from hypothesis import strategies as st

from minivllm.lora.ops.triton_ops import LoRAKernelMeta
from minivllm.lora.ops.triton_ops.lora_kernel_metadata import build_tiles, tile_count

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
    assert all(slot == -1 for slot in slots[used:])
    rows = rows.tolist()
    return [(s, rows[f : f + n]) for s, f, n in zip(slots[:used], firsts[:used], lengths[:used])]


@pytest.mark.lab("4.1")
@pytest.mark.parametrize("token_slots", BATCHES.values(), ids=BATCHES.keys())
def test_every_adapter_row_is_in_one_tile_of_its_slot(token_slots):
    found = build_tiles(torch.tensor(token_slots, device=DEVICE), 4, 12, 16)

    assert tiles_found(*found) == expected_tiles(token_slots, 16)


@pytest.mark.lab("4.1")
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=150), st.sampled_from([1, 2, 16]))
def test_any_mixture_gives_full_tiles_in_the_order_of_slots(token_slots, block_rows):
    found = build_tiles(torch.tensor(token_slots), 7, 160, block_rows)

    assert tiles_found(*found) == expected_tiles(token_slots, block_rows)


@pytest.mark.lab("4.1")
def test_all_rows_are_in_the_order_with_base_rows_last():
    token_slots = random_slots(90, 5, seed=4)

    rows, _ = build_tiles(token_slots, 5, 20, 16)

    assert sorted(rows.tolist()) == list(range(90))
    base = int((token_slots < 0).sum())
    assert (token_slots[rows[90 - base :]] < 0).all()


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
