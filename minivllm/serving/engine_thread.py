"""A thread for an engine alone. Stands for `EngineCoreProc` of vllm/v1/engine/core.py (v0.22.1), which is a process."""

import logging
import threading

from minivllm.engine.llm_engine import LLMEngine
from minivllm.serving.engine_loop import EngineLoop
from minivllm.serving.errors import EngineDeadError, died_of

logger = logging.getLogger(__name__)


class EngineThread(EngineLoop):
    """An engine in a thread of its own, until it is stopped or an error ends it."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        """What ended the engine."""
        return self.hand_over.error

    def stop(self) -> None:
        """End the thread after the step that it is in. Requests that have not ended get an EngineDeadError."""
        self._stopping = True
        self.call(lambda engine: None)  # it may be waiting for a call
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error: Exception = EngineDeadError("the engine was shut down; start another one")
        try:
            while not self._stopping:
                self.turn(wait=True)
            self.engine.abort_request(list(self.sinks))
        except BaseException as cause:  # whatever it is, whoever waits must hear of it
            logger.error("the engine has ended", exc_info=cause)
            error = died_of(cause)
        self.hand_over.end(error)
        self.fail(error)
