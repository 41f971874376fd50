def _step(self, outputs: list[RequestOutput]) -> None:
    started = self.clock()
    self._settle_adapters(outputs)
    scheduled = self.scheduler.schedule()
    for request_id in scheduled.cached_tokens:
        self.output_processor.mark_scheduled(request_id)
    for request in scheduled.refused:
        self._finish(request, outputs)
    if len(scheduled.scheduled) == 0 or self._prepare_adapters(scheduled, outputs):
        return
    begun = self.clock()
    launched = self._launch(scheduled)
    for listen in self.listeners:
        listen(scheduled)
    for adapter_id in scheduled.prefetch:
        self.runner.prefetch_lora(adapter_id)
    sampled = self._sample(launched, outputs)
    forward_seconds = self.clock() - begun
    tokens = {}
    for request_id, (token, _) in sampled.items():
        tokens[request_id] = [token]
    for request in self.scheduler.update_from_output(scheduled, tokens):
        _, logprobs = sampled[request.request_id]
        self._finish(request, outputs, logprobs)
    self.metrics.observe_step(self.clock() - started, forward_seconds)
