def accept(self, found: dict[str, LoRALayerWeights]) -> LayerWeights:
    parts = self.by_slice(found)
    for i in range(len(parts)):
        if parts[i] is None:
            continue
        width, height = self.part_sizes[i % self.n_slices]
        self.refuse_misfit(parts[i], width, height)
    copies = []
    for weights in parts:
        copies.append(copy(weights))
    return self.pack(copies)

def refuse_misfit(self, weights: LoRALayerWeights, width: int, height: int) -> None:
    self._refuse_beside(weights)
    name = weights.module_name
    rank = weights.lora_a.shape[0]
    if rank > self.max_rank:
        raise ValueError(
            f"{name}: rank {rank} is more than max_lora_rank {self.max_rank}, --max-lora-rank {rank} would do"
        )
    a, b = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
    if a != (rank, width) or b != (height, rank):
        raise ValueError(f"{name}: lora_A is {a}, not {(rank, width)}, or lora_B is {b}, not {(height, rank)}")
