def shrink_runs(
    inputs: torch.Tensor, lora_a: torch.Tensor, output: torch.Tensor, runs: Runs, scaling: float = 1.0
) -> None:
    a = matrices(lora_a)
    dtype = widest_dtype(inputs, a, output)
    for slot, rows in runs:
        product = torch.einsum("tk,rk->tr", inputs[rows].to(dtype), a[slot].to(dtype))
        output[rows, : a.shape[1]] = product * scaling


def expand_runs(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    runs: Runs,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    b = matrices(lora_b)[:, :slice_size]
    rank, dtype = b.shape[2], widest_dtype(inputs, b, output)
    for slot, rows in runs:
        product = torch.einsum("tr,nr->tn", inputs[rows, :rank].to(dtype), b[slot].to(dtype))
        columns = output[rows, slice_offset : slice_offset + slice_size]
        if add_inputs:
            product = columns + product
        columns.copy_(product)
