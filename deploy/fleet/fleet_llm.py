"""Several engines, for a server that knows one."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

from deploy.fleet.replica import Version
from minivllm.config import EngineConfig
from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import EngineDeadError
from minivllm.lora.events import LoRAEvent
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.calls import EngineSnapshot, describe_adapters
from minivllm.serving.streams import OutputKind, aborted
from minivllm.serving.wire import OutputDelta, OutputReader

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Until an engine says that it is well.
SECONDS_TO_ANSWER = 5.0


class Engines(Protocol):
    """Replicas (`Replica`), wherever they are. EngineDeadError when the one that was asked has ended."""

    def generate(self, adapter: str | None, *args: Any) -> AsyncGenerator[Any, None]:
        """`Replica.generate` of one engine, of those that have the adapter if there are any."""

    async def one(self, method: str, *args: Any) -> Any:
        """The result of any engine; what it raises is raised."""

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Results of all engines, errors among them."""


@dataclass
class NoEngine:
    """In the stead of the `EngineClient` of a single engine: what does not depend on which one."""

    config: EngineConfig
    tokenizer: Any
    error: None = None
    clock: Callable[[], float] = time.monotonic

    def stop(self, timeout: float = 0.0) -> None:
        """Engines are not ended from here."""


class FleetLLM(AsyncLLM):
    """What a server asks, answered by one engine of several, or by all.

    An adapter's name stands for one version at a time. A request takes the version along that stands when it comes,
    and an engine that has an older one reads the adapter first.
    """

    def __init__(self, engines: Engines, config: EngineConfig, tokenizer: Any) -> None:
        super().__init__(NoEngine(config, tokenizer))
        self.engines = engines
        self._versions: dict[str, Version] = {}

    @property
    def adapter_names(self) -> Collection[str]:
        return self._versions.keys()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | str | None = None,
        *,
        output_kind: OutputKind = "delta",
        on_abort: Callable[[RequestOutput], object] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`. What comes to `on_abort` has the tokens that have reached this process: of the kind
        "final" those of the last second may be missing."""
        version = self._version(lora_request)
        name = None if version is None else version.adapter.lora_name
        reader = OutputReader(request_id)
        items = self.engines.generate(name, prompt, sampling_params, request_id, version, output_kind)
        last: RequestOutput | None = None
        try:
            async with aclosing(items):
                async for item in items:
                    if isinstance(item, Exception):
                        raise item
                    last = reader.output(item) if isinstance(item, OutputDelta) else item
                    if output_kind != "final" or last.finished:
                        yield last
        except (asyncio.CancelledError, GeneratorExit):
            if on_abort is not None and not (last and last.finished):
                on_abort(aborted(request_id, last))
            raise

    def _version(self, lora_request: LoRARequest | str | None) -> Version | None:
        """The one that stands. ValueError for a bare name that is not known."""
        if lora_request is None:
            return None
        if isinstance(lora_request, str):
            if lora_request not in self._versions:
                raise ValueError(f"adapter '{lora_request}' is not known")
            return self._versions[lora_request]
        known = self._versions.get(lora_request.lora_name)
        return known or Version(lora_request, self._next_number())

    def _next_number(self) -> int:
        """Larger than any before, also than those of another server that stood here."""
        return max([time.time_ns(), *(version.number + 1 for version in self._versions.values())])

    async def run_in_tokenizer_thread(self, function: Callable[[], T]) -> T:
        return await self._tokenizing.run(function)

    # ---- adapters -------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have one engine read it; if that one refuses, nothing has changed. The others read it when it is asked for.

        With `load_inplace` all read it now. When this returns, no request gets the weights of before any more: an
        engine that could not read it does so before its next request for it, or that request fails.
        """
        name = lora_request.lora_name
        if name in self._versions and not lora_request.load_inplace:
            return False
        version = Version(replace(lora_request, load_inplace=False), self._next_number())
        await self.engines.one("bring", version)
        self._versions[name] = version
        if lora_request.load_inplace:
            _log_errors(f"adapter '{name}' was not read again", await self.engines.all("bring", version))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Nobody finds it from now on. It returns when all engines have taken it out, and its requests have ended."""
        names = [name for name, each in self._versions.items() if each.adapter.lora_int_id == lora_id]
        for name in names:
            del self._versions[name]
            _log_errors(f"adapter '{name}' was not taken out", await self.engines.all("forget", name))
        return bool(names)

    async def pin_lora(self, lora_id: int) -> bool:
        raise ValueError(
            "a slot belongs to one engine, and there are several here; adapters cannot be pinned"
        )

    async def unpin_lora(self, lora_id: int) -> bool:
        return await self.pin_lora(lora_id)

    async def list_loras(self) -> set[int]:
        return {version.adapter.lora_int_id for version in self._versions.values()}

    # ---- the engines ----------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """What all engines say of themselves as one (`VIEWS`); else what any of them says."""
        if function not in VIEWS:
            return await self.engines.one("call", function, *args)
        told = await self.engines.all("call", function, *args)
        answers = [answer for answer in told if not isinstance(answer, BaseException)]
        if not answers:
            raise EngineDeadError("no engine answers; Ray Serve starts others")
        return VIEWS[function](answers)

    async def watch_adapters(self, listener: Callable[[LoRAEvent], object]) -> None:
        """Engines keep to themselves what happens to adapters."""

    async def check_health(self) -> None:
        """EngineDeadError when no engine answers in time."""
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                await self.engines.one("check_health")
        except TimeoutError:
            raise EngineDeadError(f"no engine answered within {SECONDS_TO_ANSWER:g} s") from None


def _log_errors(what: str, results: Iterable[Any]) -> None:
    for error in results:
        if isinstance(error, BaseException):
            logger.warning("%s by one engine: %s", what, error)


def together(views: list[EngineSnapshot]) -> EngineSnapshot:
    """Counts are sums; the KV cache in use is a mean, of engines that all have as much."""
    stats = {
        each.name: sum(getattr(view.scheduler, each.name) for view in views)
        for each in fields(views[0].scheduler)
    }
    scheduler = replace(views[0].scheduler, **stats)
    running = {name for view in views for name in view.running}
    return EngineSnapshot(
        replace(scheduler, kv_cache_usage=scheduler.kv_cache_usage / len(views)),
        {count: sum(view.adapters[count] for view in views) for count in views[0].adapters},
        sorted(running),
        sorted({name for view in views for name in view.waiting} - running),
        sum(view.max_loras for view in views),
    )


def where_last_used(views: list[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Of each adapter what the engine says that used it last."""
    found: dict[int, dict[str, Any]] = {}
    for view in views:
        for adapter_id, said in view.items():
            if adapter_id not in found or (said["last_used"] or 0) > (found[adapter_id]["last_used"] or 0):
                found[adapter_id] = said
    return found


# Function that an engine runs of itself -> its results as one.
VIEWS: dict[Callable[..., Any], Callable[[list[Any]], Any]] = {
    EngineSnapshot.of: together,
    describe_adapters: where_last_used,
}
