"""A thread for an engine alone. Stands for `EngineCoreProc` of vllm/v1/engine/core.py (v0.22.1), which is a process."""

import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import id_in_use
from minivllm.lora.request import LoRARequest
from minivllm.serving.adapter_reader import PARALLEL_READS, AdapterReader
from minivllm.serving.client import SECONDS_TO_STOP
from minivllm.serving.engine_loop import EngineLoop, Sink
from minivllm.serving.errors import EngineDeadError, died_of
from minivllm.serving.streams import aborted, wake

logger = logging.getLogger(__name__)


class EngineThread(EngineLoop):
    """An engine in a thread of its own, until it is stopped or an error ends it; an `EngineClient`.

    parallel_reads   adapters that are read from disk at the same time, beside the steps
    """

    def __init__(self, engine: LLMEngine, parallel_reads: int = PARALLEL_READS) -> None:
        super().__init__(engine)
        self.config, self.tokenizer, self.clock = engine.config, engine.tokenizer, engine.clock
        self.reader = None
        if engine.adapters is not None:
            self.reader = AdapterReader(engine, parallel_reads, lambda: self.call(_do_nothing))
            self.is_held_up = lambda: self.reader.is_reading
        self._checking: dict[str, Sink] = {}  # of requests whose adapters are being checked
        # It ends at once, also where nobody asks for a step.
        engine.executor.on_death(lambda check: self.call(lambda engine: check()))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        """What ended the engine."""
        return self.hand_over.error

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the thread after the step that it is in, however long that takes. Requests that have not ended get an
        EngineDeadError."""
        self._stopping = True
        self.call(_do_nothing)  # it may be waiting for a call
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self.reader is not None:
                self.reader.close()

    @property
    def adapter_names(self) -> Collection[str]:
        """By which the engine knows adapters, as one operation reads them."""
        return () if self.engine.adapters is None else self.engine.adapters.by_name

    def read_ahead(self, lora_request: LoRARequest) -> "Future[Future[None] | None]":
        """Have an adapter read that somebody is about to load (`AdapterReader.begin_ahead`)."""
        return self.call(self._read_ahead, lora_request)

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """It is loaded by now, or nobody is about to load it any more."""
        if self.reader is not None:
            self.call(self._end_ahead, lora_request)

    def _begin(
        self, engine: LLMEngine, sink: Sink, request_id: str, args: tuple, options: dict[str, Any]
    ) -> None:
        """As in the parent class. An adapter that the engine does not know is checked first, beside the steps."""
        if not isinstance(request_id, str):  # the engine refuses it
            super()._begin(engine, sink, request_id, args, options)
            return
        if request_id in self._checking:
            raise id_in_use(request_id)
        lora_request = options.get("lora_request", args[3] if len(args) > 3 else None)
        check = None
        if self.reader is not None and isinstance(lora_request, LoRARequest):
            check = self.reader.check_ahead(lora_request)
        if check is None:
            super()._begin(engine, sink, request_id, args, options)
            return
        self._checking[request_id] = sink

        def begin_checked(engine: LLMEngine) -> None:
            if self._checking.get(request_id) is sink:  # else it was aborted
                del self._checking[request_id]
                with self.reader.with_check(lora_request, check):
                    super(EngineThread, self)._begin(engine, sink, request_id, args, options)

        check.add_done_callback(lambda check: self._tell_refusals(sink, self.call(begin_checked)))

    def _abort(self, engine: LLMEngine, request_ids: list[str], sink: Sink | None) -> None:
        for request_id in request_ids:
            waits = self._checking.get(request_id)
            if waits is not None and sink in (None, waits):
                del self._checking[request_id]
                if waits.put(aborted(request_id, None)):
                    wake([waits])
        super()._abort(engine, request_ids, sink)

    def _read_ahead(self, engine: LLMEngine, lora_request: LoRARequest) -> "Future[None] | None":
        return None if self.reader is None else self.reader.begin_ahead(lora_request)

    def _end_ahead(self, engine: LLMEngine, lora_request: LoRARequest) -> None:
        self.reader.end_ahead(lora_request)

    def _run(self) -> None:
        error: Exception = EngineDeadError("the engine was shut down; start another one")
        try:
            while not self._stopping:
                self.turn(wait=True)
            self.engine.abort_request(list(self.sinks))
        except BaseException as cause:  # whatever it is, whoever waits must hear of it
            logger.error("the engine has ended", exc_info=cause)
            error = died_of(cause)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """Whoever waits for anything gets the error."""
        self.hand_over.end(error)
        checking, self._checking = self._checking, {}
        self.fail(error)
        # Not when its check ends: a disk may keep that for ever.
        wake([sink for sink in checking.values() if sink.put(error)])


def _do_nothing(engine: LLMEngine) -> None:
    pass
