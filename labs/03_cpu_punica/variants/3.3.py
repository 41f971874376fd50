def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    lora_b = matrices(lora_b_weights)[:, :slice_size]
    rank, dtype = lora_b.shape[2], widest_dtype(inputs, lora_b, output_tensor)
    slots = lora_indices_tensor.tolist()
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        product = torch.mv(lora_b[slots[token]].to(dtype), inputs[token, :rank].to(dtype))
        columns = output_tensor[token, slice_offset : slice_offset + slice_size]
        if add_inputs:
            product = columns + product
        columns[:] = product
