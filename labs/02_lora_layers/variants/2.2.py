def write(self, slot: int, parts: Sequence[LoRALayerWeights | None]) -> None:
    for i, part in zip(range(len(self.a)), parts, strict=True):
        rank = 0
        if part is not None:
            rank = part.lora_a.shape[-2]
        if rank > 0:
            if rank > self.live_ranks[i][slot]:
                self.live_ranks[i][slot] = rank
            self.a[i][slot, :, :rank] = part.lora_a
            self.b[i][slot, :, :, :rank] = part.lora_b
        self._clear_past(slot, i, rank)
    self._write_beside(slot, parts)
    self.changed(slot)

def clear(self, slot: int) -> None:
    for i, _ in enumerate(self.a):
        self._clear_past(slot, i, 0)
    self._write_beside(slot, [None for _ in self.a])
    self.changed(slot)

def _clear_past(self, slot: int, i: int, rank: int) -> None:
    last = self.live_ranks[i][slot]
    if last > rank:
        self.a[i][slot, :, rank:last].zero_()
        self.b[i][slot, :, :, rank:last].zero_()
    self.live_ranks[i][slot] = rank
