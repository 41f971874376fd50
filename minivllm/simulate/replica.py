"""One engine on a virtual clock. Stands for `minivllm.engine.core.EngineCore` and its runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.gpu.pages.pool import PAGE_RANKS
from minivllm.gpu.pages.scheduler import scheduler_for_pages
from minivllm.lora.request import LoRARequest
from minivllm.lora.tiers import MakeCache, least_recently_used
from minivllm.policies.install import rank_of
from minivllm.policies.keeping import PolicyCache
from minivllm.policies.prefetching import Waiting
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.adapters import AdapterSize, RecordedWorker
from minivllm.simulate.cost_model import CostModel, Held, StepWork, work_of
from minivllm.simulate.device_time import DeviceTime
from minivllm.simulate.reader import Reader
from minivllm.simulate.replica_config import ReplicaConfig
from minivllm.simulate.traffic import Arrival, check_arrival


@dataclass(slots=True)
class Served:
    """A request and the times of its tokens.

    first_s, last_s   when its first and its last token came
    """

    arrival: Arrival
    replica: int
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass
class Counters:
    """Counters of a replica.

    busy_s      seconds of its steps, and of the copies and reads that they waited for
    concurrent_copies   copies into slots while a step ran
    reads       in steps; concurrent ones are counted by the reader
    with_adapter, in_slot, in_memory   requests with adapters, and how many found theirs there when they were queued
    """

    steps: int = 0
    busy_s: float = 0.0
    copies: int = 0
    concurrent_copies: int = 0
    reads: int = 0
    with_adapter: int = 0
    in_slot: int = 0
    in_memory: int = 0


class Replica:
    """The engine's scheduler, admission, caches and blocks, unchanged. A cost model stands for the forward pass.

    The caller keeps the time: `begin_step` returns how long a step takes, and `end_step` commits it.

    adapters   id -> size
    inbox      requests that came while a step runs; they are queued when it has finished
    """

    def __init__(
        self, number: int, config: ReplicaConfig, cost: CostModel, adapters: Mapping[int, AdapterSize]
    ) -> None:
        self.number, self.config, self.cost, self.adapters = number, config, cost, adapters
        self.ranks = {adapter_id: size.rank for adapter_id, size in adapters.items()}
        self.worker = RecordedWorker(
            config.lora, config.scheduler, self.ranks, self._num_pages(), self._make_cache()
        )
        self.manager = self.worker.manager
        self.queues = RequestQueues()
        self.reader = Reader(
            self.worker,
            self.queues,
            self._disk_seconds,
            config.parallel_reads,
            self._unpack_seconds,
        )
        why_wait = {"why_wait": self.reader.why_wait} if config.concurrent_reads else {}
        # `minivllm.assembly.make_scheduler` takes these from a model and a runner, and there is neither.
        self.scheduler = scheduler_for_pages(
            self.manager,
            config.elastic.blocks_a_page if config.elastic else 0,
            config.scheduler,
            config.cache,
            config.lora,
            max_model_len=config.max_model_len,
            adapter_identity=self._adapter_identity,
            can_prefetch=self._can_prefetch,
            policy=config.scheduling and config.scheduling(partial(rank_of, self.manager.get_adapter)),
            queues=self.queues,
            **why_wait,
        )
        self.prefetching = config.prefetching and config.prefetching()
        self.inbox: list[tuple[Request, Served]] = []
        self.served: dict[str, Served] = {}
        self.counters = Counters()
        self.device = DeviceTime()
        self.output: SchedulerOutput | None = None  # of the step that runs
        self._stays_unread = False  # that step's tokens are read in the next one
        self._unread: list[tuple[Request, bool, bool]] = []  # as `_commit` gives them, of the step before
        self._answered: list[Request] = []
        self._num_requests = 0
        self.seen: set[int] = set()  # adapters that were in memory, or that a request named
        self._num_checks = 0  # of adapters that came with the requests of this step for the first time

    def _make_cache(self) -> MakeCache:
        keeping = self.config.keeping
        if keeping is None:
            return least_recently_used
        return lambda capacity, get_adapter: PolicyCache(capacity, keeping(self._read_seconds))

    def _num_pages(self) -> int:
        """For adapters, those that KV blocks lend among them, as minivllm/gpu/pages counts them; 0 = slots of one size.

        ValueError for fewer than an adapter of the largest rank needs: that many are kept for one that is to be read.
        """
        elastic = self.config.elastic
        if elastic is None:
            return 0
        pages = -(-self.config.cache.num_blocks // elastic.blocks_a_page) + elastic.pages
        rank = max([self.config.lora.max_lora_rank, *self.ranks.values()])
        if self.ranks and (needs := -(-rank // PAGE_RANKS)) > pages:
            raise ValueError(
                f"an adapter of rank {rank} needs {needs} pages, more than all {pages}; give more pages or KV blocks"
            )
        return pages

    # For routers.

    @property
    def load(self) -> int:
        """Unfinished requests."""
        return len(self.served)

    def has(self, adapter_id: int) -> bool:
        """Whether the adapter is in a slot or in memory, or about to be."""
        return self.reader.is_there(adapter_id) or adapter_id in self.reader.reads

    # Requests and steps.

    def add(self, arrival: Arrival) -> Served:
        """Take a request in; the next step that begins sees it. ValueError for one that can never run."""
        check_arrival(arrival, len(self.ranks))
        name = str(self._num_requests)
        self._num_requests += 1
        # One token stands for all of a session, so that the prefix cache finds what was said before.
        token = 2 * arrival.session if arrival.session is not None else 2 * self._num_requests + 1
        lora = None if arrival.adapter is None else lora_request(arrival.adapter + 1)
        prompt = [token] * arrival.prompt_tokens
        request = Request(name, prompt, answer_of(arrival.output_tokens), lora, arrival.time_s)
        self.scheduler.check_request(request)
        self.served[name] = served = Served(arrival, self.number)
        self.inbox.append((request, served))
        return served

    def begin_step(self, now: float) -> float | None:
        """Schedule and launch a step: the seconds until `end_step`. None if nothing can run now: see `wakes_at`."""
        self.reader.settle(now)
        arrived = [request for request, _ in self.inbox]
        self.inbox.clear()
        unseen = {request.adapter_id for request in arrived} - self.seen - {0}
        self.seen |= unseen
        self._num_checks = len(unseen)
        self.worker.taken = []
        for request in arrived:
            self.scheduler.add_request(request)
            self._count_hit(request.adapter_id)
        if self.prefetching:
            known = Waiting(now, arrived, self._answered, self.scheduler.waiting, self.manager.capacity)
            for adapter_id in self.prefetching(known):
                self.reader.begin_ahead(adapter_id)
        self._answered = []
        output = self.scheduler.schedule()
        while output.preempted and not output.scheduled:  # the next one finds the blocks that they gave back
            output = self.scheduler.schedule()
        if not output.scheduled and not self._unread:
            return None
        self.output = output
        if not output.scheduled:  # this call only reads the tokens of the step before
            self._stays_unread = False
            return max(0.0, self.device.free_at - now)
        return self._launch(output, now) - now

    @property
    def wakes_at(self) -> float | None:
        """When something can run although nothing comes: when an adapter is read. None without unfinished requests."""
        if not self.scheduler.requests:
            return None
        if self.reader.next_there is None:
            raise ValueError(
                f"replica {self.number} has {self.load} requests, none of which can run; give more KV blocks or pages"
            )
        return self.reader.next_there

    def end_step(self, now: float) -> list[Served]:
        """Commit the step that was begun, and deliver its tokens, or those of the step before if they stay unread.

        Returns the requests that have their last token now.
        """
        output, self.output = self.output, None
        delivered, self._unread = self._unread, self._commit(output) if output.scheduled else []
        if not self._stays_unread:
            delivered, self._unread = delivered + self._unread, []
        finished = []
        for request, is_first, is_last in delivered:
            served = self.served[request.request_id]
            if is_first:
                served.first_s = now
            if is_last:
                served.last_s = now
                finished.append(self.served.pop(request.request_id))
                self._answered.append(request)
        return finished

    def _commit(self, output: SchedulerOutput) -> list[tuple[Request, bool, bool]]:
        """The requests that get a token, and whether it is their first and their last."""
        sampled = {
            s.request.request_id: s.request.prompt_token_ids[:1] for s in output.scheduled if s.samples
        }
        return [
            (request, len(request.output_token_ids) == 1, request.is_finished)
            for request in self.scheduler.update_from_output(output, sampled)
        ]

    # Times.

    def _launch(self, output: SchedulerOutput, now: float) -> float:
        """Bring the step's adapters into slots and compute it, in the order of `EngineCore._step`.

        Returns when its call returns.
        """
        wanted = {r.adapter_id: r.lora_request for r in output.running if r.adapter_id}
        free_at, is_graph = self.device.free_at, output.total_num_scheduled_tokens <= self.cost.graph_tokens
        self._stays_unread = self.config.scheduler.async_scheduling and self.cost.graph_tokens > 0
        launched_at = now + self.cost.launch_s + self._bring_in(wanted, bool(output.cached_tokens))
        work = work_of(output, self.ranks)
        held = self.held_by(work)
        launched_at = self.reader.engine_works(launched_at, self.cost.host_seconds(held))
        if not is_graph:  # the host needs the tokens of the step before
            launched_at = max(launched_at, free_at)
        if not self.cost.concurrent_copies:
            launched_at += sum(map(self._copy_seconds, self.worker.layers.copied))
        else:
            self._copy(max(launched_at, free_at))
        seconds = self.cost.step_seconds(work)
        seconds += self.cost.slowed_s * self._prefetch(output.prefetch, max(launched_at, free_at))
        kernels_s = self.reader.engine_works(launched_at, self.cost.launch_seconds(work)) - launched_at
        self.device.run(launched_at, seconds, wanted, kernels_s)
        self.counters.steps += 1
        self.counters.busy_s += self.device.free_at - max(now, free_at)
        read_at = free_at if self._stays_unread else self.device.free_at
        return max(launched_at + kernels_s, read_at)

    def held_by(self, work: StepWork | None) -> Held:
        """What delays the launch of the step that was begun, and the concurrent reads.   work: of that step, if any"""
        reads = len(self.reader.reads)
        prompts = int(bool(reads and work and work.prompt_steps))
        return Held(self._num_checks, len(self.worker.taken), prompts, reads)

    def _bring_in(self, wanted: dict[int, LoRARequest], admits: bool) -> float:
        """Bring the step's adapters into slots; the seconds of reads. `layers.copied` has the ids of copied ones."""
        self.worker.read, self.worker.layers.copied = [], []
        if admits:
            for error in self.worker.prepare_adapters(wanted.values()).values():
                raise error
        self.worker.bring_in(wanted)
        self.counters.copies += len(self.worker.layers.copied)
        self.counters.reads += len(self.worker.read)
        return sum(map(self._read_seconds, self.worker.read))

    def _copy(self, begins: float) -> None:
        """Have the device copy the adapters that the worker has copied."""
        for adapter_id in self.worker.layers.copied:
            self.device.copy(adapter_id, begins, self._copy_seconds(adapter_id))

    def _prefetch(self, adapter_ids: Iterable[int], begins: float) -> int:
        """Copy adapters into slots while the step runs, as `ModelRunner.prefetch_lora` does; how many."""
        self.worker.layers.copied = []
        for adapter_id in adapter_ids:
            if self._can_prefetch(adapter_id) and self.manager.has_room_for(adapter_id):
                self.manager.activate_adapter(adapter_id)
        self._copy(begins)
        copied = len(self.worker.layers.copied)
        self.counters.copies += copied
        self.counters.concurrent_copies += copied
        return copied

    def _count_hit(self, adapter_id: int) -> None:
        if adapter_id:
            self.counters.with_adapter += 1
            self.counters.in_slot += adapter_id in self.manager.tiers.slots
            self.counters.in_memory += self.reader.is_there(adapter_id)

    def _can_prefetch(self, adapter_id: int) -> bool:
        in_memory = self.manager.get_adapter(adapter_id) is not None
        return self.cost.concurrent_copies and in_memory and adapter_id not in self.manager.tiers.slots

    def _adapter_identity(self, adapter_id: int) -> int | None:
        record = self.manager.get_adapter(adapter_id)
        return record and record.load_id

    def _read_seconds(self, adapter_id: int) -> float:
        return self.cost.read_seconds(self.adapters[adapter_id].num_bytes)

    def _disk_seconds(self, adapter_id: int) -> float:
        return self.cost.disk_seconds(self.adapters[adapter_id].num_bytes)

    def _unpack_seconds(self, adapter_id: int) -> float:
        return self.cost.unpack_seconds(self.adapters[adapter_id].num_bytes)

    def _copy_seconds(self, adapter_id: int) -> float:
        return self.cost.copy_seconds(self.adapters[adapter_id].num_bytes)


@lru_cache(maxsize=4096)
def answer_of(tokens: int) -> SamplingParams:
    """An answer of exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@lru_cache(maxsize=200_000)
def lora_request(adapter_id: int) -> LoRARequest:
    return LoRARequest(f"adapter-{adapter_id}", adapter_id, f"simulated/{adapter_id}")
