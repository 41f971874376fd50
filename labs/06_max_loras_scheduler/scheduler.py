"""What the next step computes, and for whom. Stands for vllm/v1/core/sched/scheduler.py (v0.22.1)."""

from __future__ import annotations

from minivllm.labs import Todo
from collections.abc import Callable, Iterable

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.in_flight import InFlight
from minivllm.core.kv_cache import BlockPool, KVCacheManager
from minivllm.core.line import Line
from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import (
    ADAPTER_COPY,
    MAX_LORAS,
    NO_BLOCKS,
    RELOAD_PENDING,
    SchedulerOutput,
    SchedulerStats,
)
from minivllm.core.request import Request, RequestStatus, all_pinned, check_stop, lora_is_off
from minivllm.core.waiting_queue import WaitingQueue


class Scheduler:
    """Continuous batching under a token budget, KV blocks, max_num_seqs and max_loras. vLLM: `Scheduler`.

    `schedule` decides and `update_from_output` commits. schedule() moves requests between the queues,
    gives and takes KV blocks, sets `num_computed_tokens` of a request it admits to what the prefix cache
    holds, or of one it preempts to 0, and notes which adapters were passed over. It never counts a token as
    computed, lets no block be found, and moves no clock. So a step that failed is simply dropped: finish the
    requests at fault and schedule again.

    waiting     by arrival; a preempted request goes back to its place
    running     by admission, so that prompts in the making come after all who already answer
    in_flight   how many unfinished requests, waiting or running, each load of an adapter has
    blocked_adapters    (adapter_id, adapter_generation) -> why its requests may not be admitted now;
                the engine's, while a reload is to come
    max_skips_told      how many of the requests that a step passes over it names

    adapter_identity    see `KVCacheManager`
    pinned_adapters     ids of the adapters whose slots are pinned at this moment
    can_prefetch        whether an adapter could be copied into a slot while a step runs
    max_model_len       longest prompt plus answer, in tokens
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        lora_config: LoRAConfig | None = None,
        *,
        max_model_len: int | None = None,
        adapter_identity: Callable[[int], int | None] = lambda adapter_id: None,
        pinned_adapters: Callable[[], Iterable[int]] = tuple,
        can_prefetch: Callable[[int], bool] = lambda adapter_id: False,
    ) -> None:
        self.scheduler_config = scheduler_config
        self.max_model_len = max_model_len
        self.pinned_adapters = pinned_adapters
        self.can_prefetch = can_prefetch
        self.max_skips_told = 32
        self._prefetched: list[int] = []  # by the step before
        self.blocked_adapters: dict[tuple[int, int], str] = {}
        self.kv_cache = KVCacheManager(
            cache_config.block_size,
            cache_config.num_blocks,
            cache_config.enable_prefix_caching,
            adapter_identity,
        )
        max_loras = lora_config.max_loras if lora_config else 0
        self.waiting = WaitingQueue()
        self.lora = LoRAAdmission(max_loras, scheduler_config.max_lora_wait_steps, self.waiting)
        self.requests: dict[str, Request] = {}
        self.in_flight = InFlight()
        self.running: list[Request] = []
        self._num_arrived = 0
        self._num_preemptions = 0
        self._num_computed_tokens = 0
        self._num_sampled_tokens = 0

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request. ValueError as in `check_request`."""
        self.check_request(request)
        request.arrival_order = self._num_arrived
        self._num_arrived += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.in_flight.add(request)
        self.waiting.add(request)

    def check_request(self, request: Request) -> None:
        """ValueError if its id is in use, LoRA is off, or it can never fit in the KV cache."""
        if request.request_id in self.requests:
            raise ValueError(f"request id '{request.request_id}' is in use; give every request its own")
        if request.lora_request and not self.lora.max_loras:
            raise lora_is_off(request.request_id, request.lora_request.lora_name)
        self.kv_cache.check_fits(request, self.max_model_len)

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus, error: str | None = None
    ) -> list[Request]:
        """End requests wherever they are, also between `schedule` and `update_from_output`.

        Returns those that were ended; unknown and finished ids are passed over.
        """
        ids = [request_ids] if isinstance(request_ids, str) else dict.fromkeys(request_ids)
        requests = [self.requests[request_id] for request_id in ids if request_id in self.requests]
        for request in requests:
            self._finish(request, status, error)
        return requests

    def reset(self, requests: Iterable[Request]) -> None:
        """Forget queues, blocks and clocks, and queue exactly these requests again, by `arrival_order`.

        For a step that broke off anywhere: only the requests themselves and the counters are believed. Requests that
        ran go on as after a preemption. Counters stay, and the engine's `blocked_adapters`.

        requests    the unfinished ones
        """
        self.kv_cache.block_pool = BlockPool(self.kv_cache.block_pool.num_blocks)
        self.waiting = WaitingQueue()
        self.lora = LoRAAdmission(self.lora.max_loras, self.lora.max_wait_steps, self.waiting)
        self.requests, self.in_flight = {}, InFlight()
        self.running, self._prefetched = [], []
        for request in sorted(requests, key=lambda request: request.arrival_order):
            self._num_preemptions -= request.num_preemptions
            request.start_over(self.max_model_len)
            self._num_preemptions += request.num_preemptions
            self._queue(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def make_stats(self) -> SchedulerStats:
        pool, prefix = self.kv_cache.block_pool, self.kv_cache.prefix_cache_stats
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_free_blocks=pool.get_num_free_blocks(),
            num_cached_blocks=len(pool.hash_of),
            kv_cache_usage=self.kv_cache.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self._num_preemptions,
            num_computed_tokens=self._num_computed_tokens,
            num_sampled_tokens=self._num_sampled_tokens,
        )

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: those who run go on, then those who wait may join."""
        output = SchedulerOutput()
        self._make_lora_room(output)
        self._schedule_running(output)
        if output.halted_by is None:
            self._line = Line(self.waiting, self.lora)
            self._schedule_waiting(output)
            self._line.tell_skips(output, self.max_skips_told, self._held_back)
        output.running = list(self.running)
        self._prefetched = output.prefetch
        return output

    def update_from_output(self, output: SchedulerOutput, sampled: dict[str, list[int]]) -> list[Request]:
        """Commit a step that was computed. Returns the requests that got tokens or ended, in order.

        sampled     request id -> its new tokens, for every request scheduled with `samples`
        Requests that ended in the meantime are passed over. Ends those whose tokens say so (`check_stop`).
        """
        answered = []
        for scheduled in output.scheduled:
            request = scheduled.request
            if request.is_finished:
                continue
            num_computed_tokens = request.num_computed_tokens + scheduled.num_new_tokens
            self.kv_cache.cache_blocks(request, num_computed_tokens)
            request.num_computed_tokens = num_computed_tokens
            self._num_computed_tokens += scheduled.num_new_tokens
            if scheduled.samples:
                self._append_tokens(request, sampled[request.request_id])
                answered.append(request)
        self.lora.end_step(
            ran={request.adapter_id for request in output.running},
            sampled={s.request.adapter_id for s in output.scheduled if s.samples},
        )
        return answered

    def _make_lora_room(self, output: SchedulerOutput) -> None:
        """Preempt whoever must give up a slot; refuse whoever can never have one."""
        self.lora.begin_step((request.adapter_id for request in self.running), self.pinned_adapters())
        passed_over = self.waiting.longest_wait_first()
        output.preempted_adapters = self.lora.make_room(
            adapter_id for adapter_id in passed_over if not self._held_back(self.waiting.oldest(adapter_id))
        )
        if output.preempted_adapters:
            for request in reversed(self.running[:]):
                if request.adapter_id in output.preempted_adapters:
                    self._preempt(request, output)
        # Only if every slot is pinned can an adapter never fit. It is seldom so, and the queue may be long.
        if len(self.lora.pinned) >= self.lora.max_loras:
            never = [adapter_id for adapter_id in self.waiting.adapters if self.lora.never_fits(adapter_id)]
            for request in self.waiting.of_adapters(never):
                self._finish(request, RequestStatus.FINISHED_ERROR, all_pinned(request, self.lora.pinned))
                output.refused.append(request)

    # region lab 6.3: token budget
    def _schedule_running(self, output: SchedulerOutput) -> None:
        """Give running requests their next tokens, in order, while the budget lasts (`_budget_left`).

        Each gets all tokens it has that are not computed, or what the budget has left; `output.add` notes them.
        If `kv_cache.allocate_slots` lacks blocks for them, the request admitted last is preempted, as often as
        it takes, and `halted_by` becomes NO_BLOCKS. If that was the request itself, nobody is left to serve.
        """
        raise Todo("lab 6.3: token budget")

    # endregion

    # region lab 6.2: skip without blocking
    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit whoever can join, by `_line`, until the step is `_full`. `halted_by` says what ended it.

        Who may not join yet is passed over, with the reason (`_skip`): its adapter is about to change
        (`_held_back` says why), or does not fit (MAX_LORAS; from now on it waits, `lora.pass_over`), or comes
        into its slot beside this step (`_prefetches`: ADAPTER_COPY). Who lacks blocks (`_admit` is False) ends
        the queue: they come free one by one, and were small requests to pass, a big one might wait for ever.
        """
        raise Todo("lab 6.2: skip without blocking")

    # endregion

    def _prefetches(self, adapter_id: int, output: SchedulerOutput) -> bool:
        """Whether an adapter that fits comes into its slot beside this step, rather than hold up all who run in it.

        For one step only: whatever became of the copy, the next one does not wait for it.
        """
        if adapter_id not in output.prefetch:
            if not (adapter_id and output.scheduled) or adapter_id in self._prefetched:
                return False
            if not self.can_prefetch(adapter_id):
                return False
            self.lora.take(adapter_id)
            output.prefetch.append(adapter_id)
        return True

    def _budget_left(self, output: SchedulerOutput) -> int:
        return self.scheduler_config.max_num_batched_tokens - output.total_num_scheduled_tokens

    def _full(self, output: SchedulerOutput) -> str | None:
        """Why nobody more can join this step, whoever it is."""
        if len(self.running) >= self.scheduler_config.max_num_seqs:
            return "max_num_seqs"
        return None if self._budget_left(output) else "token budget"

    def _skip(self, request: Request, reason: str) -> None:
        """Pass it over, and with it all later ones of its adapter; `Line.tell_skips` names them."""
        self._line.skip(request, reason)

    def _admit(self, request: Request, output: SchedulerOutput) -> bool:
        """Let a waiting request run from where the prefix cache ends; False if it lacks blocks."""
        computed_blocks = [] if request.wants_prompt_logprobs else self.kv_cache.get_computed_blocks(request)
        num_cached = len(computed_blocks) * self.kv_cache.block_size
        num_new_tokens = min(request.num_tokens - num_cached, self._budget_left(output))
        if not self.kv_cache.can_hold(request, computed_blocks):
            return False
        self.kv_cache.allocate_slots(request, num_new_tokens, computed_blocks)
        self.kv_cache.record_hits(request, num_cached)
        self.waiting.remove(request)
        self.running.append(request)
        self.lora.take(request.adapter_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        output.cached_tokens[request.request_id] = num_cached
        output.add(request, num_new_tokens)
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take the blocks of a running request, which computes them anew when its turn comes again."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.add(request)
        output.preempted.append(request.request_id)

    def _held_back(self, request: Request) -> str | None:
        """Why it may not join even if there is room: another load of its adapter is awaited."""
        reason = self.blocked_adapters.get((request.adapter_id, request.adapter_generation))
        return RELOAD_PENDING if reason is None and self.in_flight.of_earlier_load(request) else reason

    def _append_tokens(self, request: Request, token_ids: list[int]) -> None:
        for token_id in token_ids:
            request.append_output_token(token_id)
            self._num_sampled_tokens += 1
            if check_stop(request, self.max_model_len):
                return self._finish(request, request.status)
        return None

    def _finish(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        del self.requests[request.request_id]
        self.in_flight.remove(request)
        self.kv_cache.free(request)
        request.status = status
        request.error = error
