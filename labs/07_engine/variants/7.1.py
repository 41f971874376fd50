@classmethod
def from_scheduler_output(cls, output: SchedulerOutput) -> "InputBatch":
    entries = [*output.scheduled]
    seen = {entry.request.request_id for entry in entries}
    for request in output.running:
        if request.request_id not in seen:
            entries.append(ScheduledRequest(request, 0, False))
    entries = sorted(entries, key=lambda entry: entry.request.adapter_id)
    return cls(
        tuple(entry.request for entry in entries),
        np.array([entry.num_new_tokens for entry in entries], dtype=np.int64),
        np.array([entry.samples for entry in entries], dtype=np.int64),
    )

def make_lora_inputs(
    self, num_scheduled_tokens: np.ndarray, num_sampled_tokens: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
    prompts, tokens, lora_requests = [], [], set()
    for request, scheduled, sampled in zip(
        self.requests, num_scheduled_tokens.tolist(), num_sampled_tokens.tolist()
    ):
        prompts += [request.adapter_id] * sampled
        tokens += [request.adapter_id] * scheduled
        if request.adapter_id != 0:
            lora_requests.add(request.lora_request)
    return tuple(prompts), tuple(tokens), lora_requests
