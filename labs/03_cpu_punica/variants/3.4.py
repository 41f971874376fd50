def compute_runs(token_slots: list[int]) -> list[tuple[int, slice]]:
    runs, start, total = [], 0, len(token_slots)
    while start < total:
        row = start
        while row < total and token_slots[row] == token_slots[start]:
            row += 1
        if token_slots[start] >= 0:
            runs.append((token_slots[start], slice(start, row)))
        start = row
    return runs
