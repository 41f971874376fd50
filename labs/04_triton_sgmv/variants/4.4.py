def begin_step(self, mapping: LoRAMapping, slot_table: list[int | None]) -> None:
    token_slots = slots_of(mapping.index_mapping, slot_table)
    prompt_slots = slots_of(mapping.prompt_mapping, slot_table)
    self.token_lora_indices = torch.tensor(token_slots, dtype=torch.int64)
    self.sampler_indices = torch.tensor(prompt_slots, dtype=torch.int64)
    self.no_lora = all(slot < 0 for slot in token_slots)
    if not self.no_lora:
        self.token_meta.prepare_tensors(self.token_lora_indices)
        self.prompt_meta.prepare_tensors(self.sampler_indices)
    self.sync_slots()

def linear(self, x: torch.Tensor, base: LinearBase, slots: TritonSlots) -> torch.Tensor:
    y, _ = base.forward(x)
    if self.no_lora:
        return y
    tiles = self.token_meta.meta_args(x.shape[0])
    expand(shrink(x, slots.flat_a, tiles, slots.ranks), slots.flat_b, y, tiles, slots.expand_ranks)
    return y
