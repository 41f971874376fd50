"""The interface of an engine to event loops, whether it is in a thread or in a process.

Stands for `EngineCoreClient` of vllm/v1/engine/core_client.py (v0.22.1).
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from minivllm.config import EngineConfig
from minivllm.engine.input_processor import Prompt
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.serving.calls import Subscribe
from minivllm.serving.streams import Sink

T = TypeVar("T")

# For the step that an engine is in, and for adapters that are being read.
SECONDS_TO_STOP = 10.0
SHUT_DOWN = "the engine was shut down; start another one"


class EngineCoreRequest(NamedTuple):
    """A request, with the parameters of `LLMEngine.add_request`. vLLM: the same name."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrival_time: float | None = None
    lora_request: LoRARequest | str | None = None


class EngineClient(Protocol):
    """An engine in a thread (`EngineThread`) or in a process of its own (`EngineProcess`).

    Methods may be called from any thread and do not block; the engine carries them out between two steps.

    tokenizer       None = prompts are token ids
    clock           seconds, on the clock of the engine's times
    error           what ended the engine; None while it runs
    adapter_names   names of the adapters that the engine knows
    """

    config: EngineConfig
    tokenizer: Any
    clock: Callable[[], float]

    @property
    def error(self) -> Exception | None: ...

    @property
    def adapter_names(self) -> Collection[str]: ...

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """The result of `function(engine, *args)`. A process takes the functions in `CALLS`."""

    def begin(self, sink: Sink, request: EngineCoreRequest) -> None:
        """Add a request. Its outputs are put into `sink`, and so is the error that `LLMEngine.add_request` raises."""

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """Abort requests; each gets a last output with finish_reason "abort".

        sink   only requests with this sink, because another one may have the id by now; None = all
        """

    def read_ahead(self, lora_request: LoRARequest) -> "Future[Future[None] | None]":
        """Read an adapter that is about to be loaded.

        The result is a future that is done when the adapter has been read or cannot be, or None if it need not be read.
        """

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """Forget what was read ahead, if the load has not taken it."""

    def subscribe(self, events: Subscribe, listener: Callable[[Any], object]) -> "Future[None]":
        """Call a listener with each event from now on (`step_records`, `adapter_events`), in another thread."""

    def unsubscribe(self, listener: Callable[[Any], object]) -> "Future[None]":
        """Call a listener no more; nothing happens for one that is not subscribed."""

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the engine after its current step. Requests that have not finished get an EngineDeadError.

        timeout   seconds until a process is killed, 0 is at once; a thread cannot be
        """
