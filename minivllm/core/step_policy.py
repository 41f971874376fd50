"""Who computes what in a step: running requests first, then waiting ones may join.

Stands for `schedule` in vllm/v1/core/sched/scheduler.py (v0.22.1).
"""

from collections.abc import Callable, Iterator
from itertools import chain

from minivllm.config import SchedulerConfig
from minivllm.core.kv_cache import KVCacheManager
from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import ADAPTER_COPY, MAX_LORAS, NO_BLOCKS, ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.waiting_queue import WaitingQueue


class StepPolicy:
    """The deciding half of the Scheduler, which keeps what stands here and says what each is."""

    scheduler_config: SchedulerConfig
    most_tokens_beside_decodes: int
    kv_cache: KVCacheManager
    lora: LoRAAdmission
    waiting: WaitingQueue
    running: list[Request]
    can_prefetch: Callable[[int], bool]
    _prefetched: list[int]
    may_run: Callable[[Request], str | None]
    _preempt: Callable[[Request, SchedulerOutput], None]

    # region lab 6.3: token budget
    def _schedule_running(self, output: SchedulerOutput) -> None:
        """Give running requests their next tokens, in order, while the budget lasts (`_budget_left`).

        Each gets all tokens it has that are not computed, or what the budget has left; `_give` notes them.
        `kv_cache.allocate_slots(request, n)` is False where blocks are lacking: `halted_by` becomes NO_BLOCKS. Then the
        request admitted last leaves `running` (`_preempt`), as often as it takes, perhaps the request itself.
        """
        for request in self.running:  # who is preempted leaves at its end
            if not (budget := self._budget_left(output)):
                return
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.kv_cache.allocate_slots(request, num_new_tokens):
                output.halted_by = NO_BLOCKS
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is request:
                    return
            self._give(request, num_new_tokens, output)

    # endregion

    # region lab 6.2: skip without blocking
    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit whoever can join, by `line`, until the step is `_full`. `halted_by` says what ended it.

        Who may not join yet is skipped. `output.passed_over` has the reason, by adapter: the first of these that holds.
        what `may_run` says   the adapter is about to change
        MAX_LORAS             it does not fit (`lora.fits`), and from now on it waits (`lora.pass_over`)
        ADAPTER_COPY          it comes into its slot beside this step (`_prefetches`)
        NO_BLOCKS ends it, where `_admit` is False. Blocks come free one by one: a big request might wait for ever.
        """
        for request in self.line(output):
            output.halted_by = self._full(output)
            if output.halted_by:
                return
            if reason := self.may_run(request):
                output.passed_over[request.adapter_id] = reason
            elif not self.lora.fits(request.adapter_id):
                self.lora.pass_over(request.adapter_id)
                output.passed_over[request.adapter_id] = MAX_LORAS
            elif self._prefetches(request.adapter_id, output):
                output.passed_over[request.adapter_id] = ADAPTER_COPY
            elif not self._admit(request, output):
                output.halted_by = NO_BLOCKS
                return

    # endregion

    def line(self, output: SchedulerOutput) -> Iterator[Request]:
        """Waiting requests, those left out whose answer is known: a step costs what it admits, whoever waits.

        First the oldest of each adapter that was passed over, the longest wait first: all while a slot is free.
        With none free it is those that have one. The others follow by arrival. In each adapter the oldest is first.
        """
        passed_over = map(self.waiting.oldest, self._adapters_in_line())
        for request in chain(passed_over, self.waiting.by_arrival()):
            if not self._full(output):
                output.asked.append(self.waiting.place(request.adapter_id) or request.arrival_order)
            yield request

    def _adapters_in_line(self) -> Iterator[int]:
        asked = set()
        for adapter_id in self.waiting.longest_wait_first():
            if len(self.lora.taken) >= self.lora.max_loras:
                break
            asked.add(adapter_id)
            yield adapter_id
        with_a_slot = [a for a in self.lora.taken - asked if self.waiting.place(a)]
        yield from sorted(with_a_slot, key=self.waiting.place)

    def _prefetches(self, adapter_id: int, output: SchedulerOutput) -> bool:
        """Whether an adapter that fits comes into its slot beside this step. So it holds up nobody who runs in it.

        For one step only: whatever became of the copy, the next one does not wait for it.
        """
        is_news = adapter_id not in self._prefetched and adapter_id not in output.prefetch
        if is_news and adapter_id and output.scheduled and self.can_prefetch(adapter_id):
            self.lora.take(adapter_id)
            output.prefetch.append(adapter_id)
        return adapter_id in output.prefetch

    def _give(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        samples = request.num_computed_tokens + num_new_tokens == len(request.all_token_ids)
        output.scheduled.append(ScheduledRequest(request, num_new_tokens, samples))
        output.total_num_scheduled_tokens += num_new_tokens

    def _budget_left(self, output: SchedulerOutput) -> int:
        """Tokens that the step has left; fewer once a request decodes in it (`most_tokens_beside_decodes`).

        The first request tells: requests that decode were admitted before those whose prompts are being computed, but
        for short prompts.
        """
        most = self.scheduler_config.max_num_batched_tokens
        if output.scheduled and output.scheduled[0].num_new_tokens == 1:
            most = min(most, self.most_tokens_beside_decodes)
        return most - output.total_num_scheduled_tokens

    def _full(self, output: SchedulerOutput) -> str | None:
        """Why nobody more can join this step, whoever it is."""
        if len(self.running) >= self.scheduler_config.max_num_seqs:
            return "max_num_seqs"
        return None if self._budget_left(output) else "token budget"

    def _admit(self, request: Request, output: SchedulerOutput) -> bool:
        """Let a waiting request run from where the prefix cache ends; False if it lacks blocks."""
        computed_blocks = [] if request.wants_prompt_logprobs else self.kv_cache.get_computed_blocks(request)
        num_cached = len(computed_blocks) * self.kv_cache.block_size
        num_new_tokens = min(request.num_tokens - num_cached, self._budget_left(output))
        if not self.kv_cache.can_hold(request, computed_blocks):
            return False
        self.kv_cache.allocate_slots(request, num_new_tokens, computed_blocks)
        self.kv_cache.record_hits(request, num_cached)
        self.waiting.remove(request, joins=True)
        self.running.append(request)
        self.lora.take(request.adapter_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        output.cached_tokens[request.request_id] = num_cached
        self._give(request, num_new_tokens, output)
        return True
