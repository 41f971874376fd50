def pack_moe(
    loras: Sequence[LoRALayerWeights | None], module_name: str, is_non_gated_moe: bool = False
) -> PackedLoRALayerWeights:
    there = sum(1 for lora in loras if lora is not None)
    if len(loras) % 3 != 0 or there == 0:
        raise ValueError(
            f"{module_name}: {len(loras)} parts, {there} of them there: not w1, w2 and w3 of each expert"
        )
    parts = [_stack_experts(loras[0::3]), _stack_experts(loras[1::3]), _stack_experts(loras[2::3])]
    if is_non_gated_moe:
        parts[2] = copy(parts[0])
        parts[2].scaling = 1
    ranks = [part.rank for part in parts if part is not None]
    return PackedLoRALayerWeights.from_parts(module_name, max(ranks), parts)


def _stack_experts(loras: Sequence[LoRALayerWeights | None]) -> LoRALayerWeights | None:
    present = {i: loras[i] for i in range(len(loras)) if loras[i] is not None}
    if len(present) == 0:
        return None
    scalings = {lora.scaling for lora in present.values()}
    if len(scalings) > 1:
        for lora in present.values():
            lora.optimize()
    first = list(present.values())[0]
    rank = 0
    for lora in present.values():
        rank = max(rank, lora.lora_a.shape[0])
    lora_a = first.lora_a.new_zeros(len(loras), rank, first.input_dim)
    lora_b = first.lora_b.new_zeros(len(loras), first.output_dim, rank)
    for expert, lora in present.items():
        own = lora.lora_a.shape[0]
        lora_a[expert, 0:own] = lora.lora_a
        lora_b[expert, :, 0:own] = lora.lora_b
    return LoRALayerWeights(first.module_name, rank, first.lora_alpha, lora_a, lora_b, first.scaling)
