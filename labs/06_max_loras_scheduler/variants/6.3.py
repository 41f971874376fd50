def _schedule_running(self, output: SchedulerOutput) -> None:
    position = 0
    while position < len(self.running):
        budget = self._budget_left(output)
        if budget == 0:
            return
        request = self.running[position]
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        if num_new_tokens > budget:
            num_new_tokens = budget
        while not self.kv_cache.allocate_slots(request, num_new_tokens):
            output.halted_by = NO_BLOCKS
            victim = self.running[-1]
            self._preempt(victim, output)
            if victim is request:
                return
        self._give(request, num_new_tokens, output)
        position += 1
