def _schedule_waiting(self, output: SchedulerOutput) -> None:
    for request in self._line(output):
        adapter_id = request.adapter_id
        output.halted_by = self._full(output)
        if output.halted_by is not None:
            return
        reason = self.may_run(request)
        if not reason and not self.lora.fits(adapter_id):
            self.lora.pass_over(adapter_id)
            reason = MAX_LORAS
        if not reason and self._prefetches(adapter_id, output):
            reason = ADAPTER_COPY
        if reason:
            output.passed_over[adapter_id] = reason
            continue
        if not self._admit(request, output):
            output.halted_by = NO_BLOCKS
            return
