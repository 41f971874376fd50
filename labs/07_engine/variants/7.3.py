@torch.inference_mode()
def launch_model(self, output: SchedulerOutput) -> PendingStep:
    batch = InputBatch.from_scheduler_output(output)
    graph_size = 0
    if self.decode_graphs:
        graph_size = self.decode_graphs.size_for(batch)
    if self.lora_manager is not None:
        self.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens, graph_size)
    if graph_size != 0:
        return self.decode_graphs.run(batch, graph_size, self._batch_has_loras())
    *inputs, last_rows = self._prepare_inputs(batch)
    hidden_states = self.model(*inputs)
    sampling, logits = [], None
    for request, samples in zip(batch.requests, batch.num_sampled_tokens.tolist()):
        if samples:
            sampling.append(request)
    if sampling:
        logits = self.model.compute_logits(hidden_states[last_rows])
    score_prompts(self, batch, hidden_states)
    return PendingStep(sampling, logits)

def _prepare_inputs(
    self, batch: InputBatch
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
    token_ids, positions, last_rows = [], [], []
    counts, lengths, block_ids = [], [], []
    scheduled, sampled = batch.num_scheduled_tokens.tolist(), batch.num_sampled_tokens.tolist()
    for request, tokens, samples in zip(batch.requests, scheduled, sampled):
        if tokens == 0:
            continue
        start = request.num_computed_tokens
        token_ids.extend(request.all_token_ids[start : start + tokens])
        positions.extend(range(start, start + tokens))
        if samples:
            last_rows.append(len(token_ids) - 1)
        counts.append(tokens)
        lengths.append(start + tokens)
        block_ids.append(request.block_ids)
    attn = self._build_attention(counts, lengths, block_ids)
    numbers = (torch.tensor(n, dtype=torch.int64, device=self.device) for n in (token_ids, positions, last_rows))
    ids, places, rows = numbers
    return ids, places, attn, rows
