def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    lora_a = matrices(lora_a_weights)
    rank, dtype = lora_a.shape[1], widest_dtype(inputs, lora_a, output_tensor)
    slots = lora_indices_tensor.tolist()
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        product = torch.mv(lora_a[slots[token]].to(dtype), inputs[token].to(dtype))
        output_tensor[token, :rank] = product * scaling
