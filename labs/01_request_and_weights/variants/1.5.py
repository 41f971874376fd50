@classmethod
def pack(cls, loras: Sequence[LoRALayerWeights | None]) -> Self:
    name, rank = None, 0
    for lora in loras:
        if lora is None:
            continue
        lora.optimize()
        if name is None:
            name = lora.module_name
        rank = max(rank, lora.rank)
    return cls.from_parts(name, rank, loras)
