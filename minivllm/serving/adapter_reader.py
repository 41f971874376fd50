"""Reads and checks adapters in threads, concurrently with steps. Stands for nothing in vLLM 0.22.1."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from minivllm.engine.adapter import Adapter
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.loading import AdapterSource, real_folder
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.serving.read_policy import ReadPolicy
from minivllm.worker.cpu_threads import set_num_threads

# The default of adapters that are read concurrently. A second one hides the disk's latency. More take cores and memory
# bandwidth from the steps, so small hosts have no more (`benchmarks.reads`).
PARALLEL_READS = max(2, min(4, (os.cpu_count() or 1) // 4))
# Adapters whose config and header are checked concurrently: one of them may come from a slow network.
PARALLEL_CHECKS = 4


@dataclass(frozen=True)
class Read:
    """An adapter that is being read, or has been.

    request  with the real folder that is read, because a link may change before the adapter is taken
    given    the request as it came
    record   the adapter's record when the read began; an adapter that was unloaded or is reloaded has another one, so
             this read is stale. None: a load is about to take it
    future   the adapter
    """

    request: LoRARequest
    given: LoRARequest
    record: Adapter | None
    future: "Future[LoRAModel]"


class AdapterReader(AdapterSource):
    """Reads the adapters of waiting requests in threads of its own, before the step that admits them needs them.

    It wraps the worker's source, and has requests wait until their adapter has been read (`read_ahead`). Methods are
    called in the engine's thread alone. A check or a load that was not begun here is done there, too, by the wrapped
    source, so that no request waits for ever.

    most        adapters that are read concurrently, and that may be held for requests that still wait
    read_done   is called in a reading thread, because the engine's thread may be waiting
    """

    def __init__(self, engine: LLMEngine, most: int, read_done: Callable[[], object]) -> None:
        self.scheduler, self.worker, self.registry = engine.scheduler, engine.adapters.worker, engine.adapters
        self._policy, self._read_done = ReadPolicy(self, most, self.scheduler), read_done
        self._reads: dict[int, Read] = {}  # by adapter id
        # Else PyTorch would give each as many threads as there are cores, and take them from the steps.
        alone = partial(set_num_threads, 1)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="minivllm-reader", initializer=alone)
        self._checkers = ThreadPoolExecutor(PARALLEL_CHECKS, thread_name_prefix="minivllm-checker")
        self._checks: dict[tuple[LoRARequest, bool], Future[LoRAModel]] = {}  # under way
        self._checked: tuple[LoRARequest, Future[LoRAModel]] | None = None
        self.source = self.worker.source
        self.manager = self.source.manager
        self.worker.read_through(lambda source: self)

    def close(self) -> None:
        """Stop the threads; the engine reads adapters in its steps again."""
        for pool in (self._pool, self._checkers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._reads.clear()
        self.worker.read_through(lambda source: self.source)

    @property
    def is_reading(self) -> bool:
        return any(not read.future.done() for read in self._reads.values())

    @property
    def loading(self) -> set[int]:
        return set(self._reads)

    @property
    def held(self) -> dict[int, bool]:
        """As in `Reads`."""
        return {adapter_id: read.future.done() for adapter_id, read in self._reads.items()}

    def forget_unwanted(self) -> None:
        """As in `Reads`, but for adapters that a load is about to take."""
        for adapter_id, read in list(self._reads.items()):
            if read.record is not None and adapter_id not in self.scheduler.in_flight:
                self._forget(read)

    def read_ahead(self, lora_request: LoRARequest) -> str | None:
        """As `AdapterSource.read_ahead`: None, or LOADING while the adapter is being read."""
        adapter_id = lora_request.lora_int_id
        if self.worker.manager.get_adapter(adapter_id) is not None:
            return None
        read, record = self._reads.get(adapter_id), self.registry.adapters.get(adapter_id)
        if read is not None and read.record is not record:
            self._forget(read)
        return self._policy.begin_or_wait(adapter_id, lambda: self._begin(lora_request, lora_request, record))

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        """As `AdapterSource.load`; takes the adapter that was read here, if it is this one."""
        read = self._reads.get(lora_request.lora_int_id)
        if read is None or not self._is_for(read, lora_request):
            return self.source.load(lora_request)
        self._forget(read)
        if read.future.cancelled():  # it had not started
            return self.source.load(lora_request)
        return read.future.result()

    def check_ahead(self, lora_request: LoRARequest) -> "Future[LoRAModel] | None":
        """Check an adapter that the engine is about to add. None if the engine knows it."""
        adapter_id = self.registry.aliases.get(lora_request.lora_int_id, lora_request.lora_int_id)
        if adapter_id in self.registry.adapters and not lora_request.load_inplace:
            return None
        key = lora_request, lora_request.load_inplace
        if (check := self._checks.get(key)) is None:
            check = self._checks[key] = self._checkers.submit(self.source.check, lora_request)
            check.add_done_callback(lambda check: self._checks.pop(key, None))
        return check

    @contextmanager
    def with_check(self, lora_request: LoRARequest, check: "Future[LoRAModel]") -> Iterator[None]:
        """Within it, `check` of this adapter returns or raises what its check in a thread did."""
        self._checked = lora_request, check
        try:
            yield
        finally:
            self._checked = None

    def check(self, lora_request: LoRARequest) -> LoRAModel:
        """As `AdapterSource.check`; takes the result of a check or a read here, if it was of this adapter."""
        if self._checked is not None and self._checked[0] == lora_request:
            return self._checked[1].result()
        read = self._reads.get(lora_request.lora_int_id)
        if read is not None and read.future.done() and self._is_for(read, lora_request):
            return read.future.result()
        return self.source.check(lora_request)

    def begin_ahead(self, lora_request: LoRARequest) -> "Future[None] | None":
        """Read an adapter that is about to be loaded; `end_ahead` follows. None if it need not be read.

        The future is done when the adapter has been read or cannot be; the load then raises the error again.
        """
        given = lora_request
        if lora_request.is_made_of_others:
            lora_request = self.registry.compose(lora_request)
        adapter_id = lora_request.lora_int_id
        in_memory = self.worker.manager.get_adapter(adapter_id) is not None
        if in_memory and not lora_request.load_inplace:
            return None
        read = self._reads.get(adapter_id)
        is_same = read is not None and self._is_for(read, lora_request)
        read = read if is_same else self._begin(lora_request, given)
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # so that it cannot be cancelled
        read.future.add_done_callback(lambda future: done.set_result(None))
        return done

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """Forget what was read ahead, if the load has not taken it."""
        read = self._reads.get(lora_request.lora_int_id)
        if read is not None and read.record is None and read.given == lora_request:
            self._forget(read)

    def _is_for(self, read: Read, lora_request: LoRARequest) -> bool:
        record = self.registry.adapters.get(lora_request.lora_int_id)
        return read.request == with_real_folder(lora_request) and (
            read.record is None or read.record is record
        )

    def _begin(self, lora_request: LoRARequest, given: LoRARequest, record: Adapter | None = None) -> Read:
        request = with_real_folder(lora_request)
        read = Read(request, given, record, self._pool.submit(self._read_and_stage, request))
        read.future.add_done_callback(lambda future: self._read_done())
        self._reads[lora_request.lora_int_id] = read
        return read

    def _forget(self, read: Read) -> None:
        read.future.cancel()
        del self._reads[read.request.lora_int_id]

    def _read_and_stage(self, lora_request: LoRARequest) -> LoRAModel:
        started = time.perf_counter()
        lora = self.source.load(lora_request)
        self.manager.stage(lora)  # here, not in the step that takes it: on a GPU it is one more copy
        lora.load_seconds = time.perf_counter() - started
        return lora


def with_real_folder(lora_request: LoRARequest) -> LoRARequest:
    """The request with the real folder of its path, links followed; unchanged if there is none on this machine."""
    folder = real_folder(lora_request.lora_path)
    is_real = folder in (None, lora_request.lora_path)
    return lora_request if is_real else replace(lora_request, lora_path=folder)
