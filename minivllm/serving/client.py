"""What an event loop asks of an engine, wherever that is. Stands for `EngineCoreClient` of
vllm/v1/engine/core_client.py (v0.22.1)."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from minivllm.config import EngineConfig
from minivllm.lora.events import LoRAEvent
from minivllm.lora.request import LoRARequest
from minivllm.observe.trace import StepRecord
from minivllm.serving.engine_loop import Sink

T = TypeVar("T")

# For the step that an engine is in, and what it reads.
SECONDS_TO_STOP = 10.0


class EngineClient(Protocol):
    """An engine in a thread (`EngineThread`) or in a process of its own (`EngineProcess`).

    Any thread may call, and none is held up: what is asked is done between two steps.

    tokenizer       None = prompts come as token ids
    clock           seconds, of which the engine's times are
    error           what ended the engine; None while it is there
    adapter_names   by which the engine knows adapters
    """

    config: EngineConfig
    tokenizer: Any
    clock: Callable[[], float]

    @property
    def error(self) -> Exception | None: ...

    @property
    def adapter_names(self) -> Collection[str]: ...

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """The result of `function(engine, *args)`. To another process it goes by its name (`CALLS`)."""

    def begin(self, sink: Sink, request_id: str, *args: Any, **options: Any) -> None:
        """Add a request. Its outputs go to `sink`, and so does what `LLMEngine.add_request` raises."""

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """End requests, each with a last output that says so.   sink: only those that are this one's"""

    def read_ahead(self, lora_request: LoRARequest) -> "Future[Future[None] | None]":
        """Have an adapter read that somebody is about to load. A future that this one has is to be waited for."""

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """It is loaded by now, or nobody is about to load it any more."""

    def watch_steps(self, listener: Callable[[StepRecord], object]) -> "Future[None]":
        """Tell a listener of every step from now on."""

    def unwatch_steps(self, listener: Callable[[StepRecord], object]) -> "Future[None]":
        """It is told no more; one that never was is passed over."""

    def watch_adapters(self, listener: Callable[[LoRAEvent], object]) -> "Future[None]":
        """Tell a listener of what happens to adapters from now on."""

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the engine after the step that it is in. Requests that have not ended get an EngineDeadError.

        timeout   seconds for that step: a process is killed then, 0 is at once. A thread cannot be
        """
