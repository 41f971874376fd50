"""What the next step computes, and for whom. Stands for vllm/v1/core/sched/scheduler.py (v0.22.1)."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache import KVCacheManager
from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import ADAPTER_COPY, MAX_LORAS, NO_BLOCKS, ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request, RequestStatus, check_stop
from minivllm.core.request_queue import RequestQueues
from minivllm.errors import all_pinned, id_in_use, lora_is_off


class Scheduler:
    """Continuous batching under a token budget, KV blocks, max_num_seqs and max_loras. vLLM: `Scheduler`.

    `schedule` decides, and `update_from_output` commits. Deciding moves requests between the queues, and gives and
    takes KV blocks. It notes whose wait for a slot begins or ends. It sets `num_computed_tokens`: of whom it admits to
    what the prefix cache holds, of whom it preempts to 0. It never counts a token as computed, lets no block be found,
    and moves no clock. So a step that failed is simply dropped: finish the requests at fault and schedule again.

    queues      the unfinished requests; `requests`, `waiting`, `running` and `in_flight` are its own. What answers
                `why_wait` may be given them before there is a scheduler
    followers   request id -> requests that are in neither queue until that one has computed the prompt they share

    adapter_identity    see `KVCacheManager`
    pinned_adapters     ids of the adapters whose slots are pinned, kept by the engine
    can_prefetch        whether an adapter could be copied into a slot while a step runs
    why_wait            (a waiting request) -> why it may not join even if there is room: its adapter is about to get
                        other weights, say. None = nothing holds it back
    policy              in which order waiting requests are asked
    max_model_len       longest prompt plus answer, in tokens
    most_tokens_beside_decodes   of a step in which somebody decodes; None = as many as of any. A step that no CUDA
                        graph holds takes a GPU several times as long as the largest that one does, and everybody who
                        decodes waits for it, while a prompt in chunks of that size costs hardly more
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        lora_config: LoRAConfig | None = None,
        *,
        max_model_len: int | None = None,
        adapter_identity: Callable[[int], int | None] = lambda adapter_id: None,
        pinned_adapters: Collection[int] = (),
        can_prefetch: Callable[[int], bool] = lambda adapter_id: False,
        why_wait: Callable[[Request], str | None] = lambda request: None,
        most_tokens_beside_decodes: int | None = None,
        policy: "SchedulingPolicy | None" = None,
        queues: RequestQueues | None = None,
    ) -> None:
        self.scheduler_config = scheduler_config
        # As many as decode at a time must fit.
        if most_tokens_beside_decodes is None or most_tokens_beside_decodes <= scheduler_config.max_num_seqs:
            most_tokens_beside_decodes = scheduler_config.max_num_batched_tokens
        self.most_tokens_beside_decodes = most_tokens_beside_decodes
        self.max_model_len = max_model_len
        self.pinned_adapters = pinned_adapters
        self.can_prefetch = can_prefetch
        self.why_wait = why_wait
        self.policy = policy or first_come_first_served
        self.queues = queues or RequestQueues()
        self.kv_cache = KVCacheManager(cache_config, adapter_identity)
        self.max_loras = lora_config.max_loras if lora_config else 0
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0
        self.clear()

    requests = property(attrgetter("queues.requests"))
    waiting = property(attrgetter("queues.waiting"))
    running = property(attrgetter("queues.running"))
    in_flight = property(attrgetter("queues.in_flight"))

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request; one that was queued before goes to its place. ValueError as in `check_request`."""
        self.check_request(request)
        if request.arrival_order < 0:
            request.arrival_order = self._num_arrived
            self._num_arrived += 1
        self.queues.enter(request)
        if request.follows is not None and self._is_prompt_pending(request.follows):
            self.followers.setdefault(request.follows.request_id, []).append(request)
        else:
            self.waiting.add(request)

    def check_request(self, request: Request) -> None:
        """ValueError if its id is in use, LoRA is off, or an empty KV cache would not hold it."""
        if request.request_id in self.requests:
            raise id_in_use(request.request_id)
        if request.lora_request and not self.lora.max_loras:
            raise lora_is_off(request.request_id, request.lora_request.lora_name)
        # The last token is sampled but never computed.
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + request.sampling_params.max_tokens - 1
        if self.max_model_len is not None:
            num_tokens = min(num_tokens, max(num_prompt_tokens, self.max_model_len - 1))
        block_size, usable = self.kv_cache.block_size, self.kv_cache.block_pool.num_usable_blocks
        if num_tokens > usable * block_size:
            raise ValueError(
                f"request '{request.request_id}' may need {-(-num_tokens // block_size)} KV blocks ({num_tokens} "
                f"tokens) but the cache has {usable}; shorten the prompt, lower max_tokens, or raise num_blocks"
            )

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

    def preempt(self, adapter_id: int) -> None:
        """Between two steps: have the running requests of an adapter wait, and compute anew what they have."""
        for request in reversed(self.running[:]):
            if request.adapter_id == adapter_id:
                self._preempt(request, SchedulerOutput())

    def clear(self) -> None:
        """Begin anew: no request, no block in use, no clock that runs. Counters and the count of arrivals stay."""
        self.kv_cache.block_pool = BlockPool(self.kv_cache.block_pool.num_blocks)
        self.queues.clear()
        self.lora = LoRAAdmission(self.max_loras, self.scheduler_config.max_lora_wait_steps, self.waiting)
        self.followers: dict[str, list[Request]] = {}
        self._prefetched: list[int] = []  # by the step before

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: those who run go on, then those who wait may join."""
        output = SchedulerOutput()
        if self.waiting.requests or self.pinned_adapters:  # else nobody wants another one's slot
            self._make_lora_room(output)
        self._schedule_running(output)
        if output.halted_by is None and self.waiting.requests:
            self._schedule_waiting(output)
            if output.halted_by is None and self.waiting:
                output.halted_by = self._full(output)
        output.running = list(self.running)
        self._prefetched = output.prefetch
        return output

    def update_from_output(self, output: SchedulerOutput, sampled: dict[str, list[int]]) -> list[Request]:
        """Commit a step that was computed. Returns the requests that got tokens or ended, in order.

        sampled     request id -> its new tokens, for every request scheduled with `samples`
        Requests that ended in the meantime are passed over. Ends those whose tokens say so (`check_stop`).
        """
        answered = []
        for request, num_new_tokens, samples in output.scheduled:
            if request.status.is_finished:
                continue
            num_computed_tokens = request.num_computed_tokens + num_new_tokens
            self.kv_cache.cache_blocks(request, num_computed_tokens)
            request.num_computed_tokens = num_computed_tokens
            self.num_computed_tokens += num_new_tokens
            if self.followers and not self._is_prompt_pending(request):
                self._queue_followers(request)
            if samples:
                self._append_tokens(request, sampled[request.request_id])
                answered.append(request)
        self.lora.end_step(
            ran={request.adapter_id for request in output.running},
            sampled={s.request.adapter_id for s in output.scheduled if s.samples},
        )
        return answered

    def _make_lora_room(self, output: SchedulerOutput) -> None:
        """Preempt requests whose adapter must give up its slot; refuse those whose adapter can never have one."""
        self.lora.begin_step((request.adapter_id for request in self.running), self.pinned_adapters)
        passed_over = self.waiting.longest_wait_first()
        output.preempted_adapters = self.lora.make_room(
            adapter_id for adapter_id in passed_over if not self.why_wait(self.waiting.oldest(adapter_id))
        )
        if output.preempted_adapters:
            for request in reversed(self.running[:]):
                if request.adapter_id in output.preempted_adapters:
                    self._preempt(request, output)
        # Only if every slot is pinned can an adapter never fit. It is seldom so, and the queue may be long.
        if len(self.lora.pinned) >= self.lora.max_loras:
            never = [adapter_id for adapter_id in self.waiting.adapters if self.lora.never_fits(adapter_id)]
            for request in self.waiting.of_adapters(never):
                error = all_pinned(request.lora_request.lora_name, len(self.lora.pinned))
                self._finish(request, RequestStatus.FINISHED_ERROR, str(error))
                output.refused.append(request)

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take the blocks of a running request, which computes them anew when its turn comes again."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)
        output.preempted.append(request.request_id)

    # Who computes what in a step.

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
            num_new_tokens = min(len(request.all_token_ids) - request.num_computed_tokens, budget)
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
        """Admit the requests that can join, in the order of `line`. One whose adapter has to wait lets others pass it.

        `output.passed_over` has for each adapter that waits the reason: what `why_wait` says of the request, MAX_LORAS
        if the adapter does not fit, or ADAPTER_COPY if it is copied into its slot beside this step (`_prefetches`).
        `why_wait` is asked first, because a request that it holds back could not use a slot: its adapter's wait for one
        does not begin. The wait of an adapter that does not fit begins here (`lora.pass_over`), and it is not copied.

        `output.halted_by` says what ended the step for all requests, and is None if all were asked. In a full step no
        request is asked, so no adapter is passed over. A request that lacks blocks ends the step, too (NO_BLOCKS):
        blocks come free one by one, and small requests that overtook a big one could take each of them, for ever.

        By hand: two slots, room for 3 requests, and the line is a1, b2, c3, d0, e1 (the digit is the adapter). a1, b2
        and d0 join, passed_over is {3: MAX_LORAS}, and halted_by is "max_num_seqs": e1 was not asked.
        """
        for request in self.line(output):
            output.halted_by = self._full(output)
            if output.halted_by:
                return
            if reason := self.why_wait(request):
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
        """Waiting requests in the order in which they are asked whether they can join: the policy's."""
        return self.policy(self, output)

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
        """Why no other request can join this step, whatever its adapter; None if one can."""
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

    # A request's tokens, and its end.

    def _append_tokens(self, request: Request, token_ids: list[int]) -> None:
        for token_id in token_ids:
            request.append_output_token(token_id)
            self.num_sampled_tokens += 1
            if check_stop(request, self.max_model_len):
                return self._finish(request, request.status)
        return None

    def _finish(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        held = self.followers.get(request.follows.request_id, []) if request.follows else []
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            (held if request in held else self.running).remove(request)
        self.queues.leave(request)
        self._queue_followers(request)
        self.kv_cache.free(request)
        request.status = status
        request.error = error

    def _is_prompt_pending(self, request: Request | None) -> bool:
        """Whether the request has still to compute a part of its prompt; False for one that has ended, and for None."""
        is_unfinished = request is not None and request.request_id in self.requests
        return is_unfinished and request.num_computed_tokens < request.num_prompt_tokens

    def _queue_followers(self, request: Request) -> None:
        """The prompt that they share is computed, or the request has ended: they queue, in the places they came to."""
        for follower in self.followers.pop(request.request_id, ()):
            self.waiting.add(follower)


# A waiting request at a time, in the order in which they are asked whether they can join a step.
SchedulingPolicy = Callable[[Scheduler, SchedulerOutput], Iterator[Request]]


def is_full(scheduler: Scheduler, output: SchedulerOutput) -> bool:
    """Whether nobody can join this step, so that no order need be made."""
    return scheduler._full(output) is not None


def first_come_first_served(scheduler: Scheduler, output: SchedulerOutput) -> Iterator[Request]:
    """Waiting requests, those left out whose answer is known: a step costs what it admits, however many wait.

    First the oldest of each adapter that was passed over, the longest wait first: all while a slot is free.
    With none free it is those that have one. The others follow by arrival. In each adapter the oldest is first.
    """
    passed_over = map(scheduler.waiting.oldest, _adapters_in_line(scheduler))
    yield from chain(passed_over, scheduler.waiting.by_arrival())


def _adapters_in_line(scheduler: Scheduler) -> Iterator[int]:
    asked = set()
    for adapter_id in scheduler.waiting.longest_wait_first():
        if len(scheduler.lora.taken) >= scheduler.lora.max_loras:
            break
        asked.add(adapter_id)
        yield adapter_id
    with_a_slot = [a for a in scheduler.lora.taken - asked if scheduler.waiting.place(a)]
    yield from sorted(with_a_slot, key=scheduler.waiting.place)
