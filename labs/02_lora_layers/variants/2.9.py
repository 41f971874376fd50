def forward(
    self,
    lm_head: ParallelLMHead,
    hidden_states: torch.Tensor,
    embedding_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    backend = self.backend
    logits = self.base_layer._get_logits(hidden_states, lm_head, embedding_bias)
    if not backend.no_lora:
        if self.embeddings_tensors is not None:
            logits = self._with_added_tokens(logits, hidden_states)
        if backend.reaches(self.slots):
            backend.add(logits, hidden_states, self.slots, backend.sample_rows(hidden_states.shape[0]))
    return logits

def _with_added_tokens(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    slots = self.backend.sample_slots(logits.shape[0])
    own = torch.clamp(slots, min=0)
    stacked = self.embeddings_tensors
    s, x, _ = stacked.shape
    of_all = F.linear(hidden_states.to(stacked.dtype), stacked.reshape(s * x, -1))
    rows = torch.arange(logits.shape[0], device=logits.device)
    added = of_all.view(-1, s, x)[rows, own].to(logits.dtype)
    there = torch.where(slots[:, None] < 0, 0, self.is_added[own, :, 0])
    added = torch.where(there == 0, torch.tensor(float("-inf"), dtype=added.dtype, device=added.device), added)
    return torch.cat((logits, added), dim=1)
