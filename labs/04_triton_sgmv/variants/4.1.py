def build_tiles(
    token_slots: torch.Tensor, max_loras: int, capacity: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.where(token_slots < 0, max_loras, token_slots).to(torch.int64)
    rows = torch.sort(slots, stable=True).indices
    counts = torch.zeros(max_loras + 1, dtype=torch.int64, device=slots.device)
    counts.scatter_add_(0, slots, torch.ones_like(slots))
    counts = counts[:max_loras]
    first_row = counts.cumsum(0) - counts
    tiles_of_slot = (counts + (block_rows - 1)) // block_rows
    last_tile = tiles_of_slot.cumsum(0)

    tile = torch.arange(capacity, device=slots.device)
    slot = torch.searchsorted(last_tile, tile, right=True)
    in_use = slot < max_loras
    index = torch.clamp(slot, max=max_loras - 1)
    nth = tile - (last_tile[index] - tiles_of_slot[index])
    done = nth * block_rows
    length = torch.clamp(counts[index] - done, max=block_rows)
    return rows, torch.stack([torch.where(in_use, index, -1), first_row[index] + done, length])
