def forward(self, x: torch.Tensor) -> torch.Tensor:
    backend = self.backend
    if backend.no_lora:
        return self.base_layer(x)
    slots = backend.token_slots(x.shape[0])
    if self.embeddings_tensors is None:
        y = self.base_layer(x)
    else:
        y = self._base_output(x, slots)
    if not backend.reaches(self.slots):
        return y
    rows = self.lora_a_stacked[torch.clamp(slots, min=0), x]
    backend.expand(y, rows, self.slots, backend.token_rows(x.shape[0]))
    return y

def _base_output(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    added = x - self.vocab_size
    is_new = added >= 0
    own = self.base_layer(x.masked_fill(is_new, 0))
    new = self.embeddings_tensors[torch.clamp(slots, min=0), torch.clamp(added, min=0)].to(own.dtype)
    return torch.where(is_new.unsqueeze(1), new, own)
