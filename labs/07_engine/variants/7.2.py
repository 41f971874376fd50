def set_active_loras(
    self,
    input_batch: InputBatch,
    num_scheduled_tokens: np.ndarray,
    num_sampled_tokens: np.ndarray | None = None,
    pad_to: int = 0,
) -> None:
    if num_sampled_tokens is None:
        num_sampled_tokens = np.ones(num_scheduled_tokens.shape, dtype=num_scheduled_tokens.dtype)
    prompts, tokens, requests = input_batch.make_lora_inputs(num_scheduled_tokens, num_sampled_tokens)
    tokens, prompts = _pad(tokens, pad_to), _pad(prompts, pad_to)
    self._manager().set_active_adapters(requests, LoRAMapping(tokens, prompts, is_prefill=True))
