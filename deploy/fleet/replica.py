"""One engine of a fleet, and which version of each adapter it has."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import EngineDeadError
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.streams import OutputKind
from minivllm.serving.wire import OutputDelta, OutputWriter, portable

# After so many the server hears how far a request has come whose client waits for the whole answer, and may leave.
SECONDS_BETWEEN_REPORTS = 1.0

# What says something to whoever asked. It goes as a value: Ray would wrap it into its own, with a traceback.
TOLD = (ValueError, FileNotFoundError, RuntimeError)


@dataclass(frozen=True)
class Version:
    """What an adapter's name stands for from some moment on.

    number   of two versions of a name the later one has the larger
    """

    adapter: LoRARequest
    number: int


class Replica:
    """An engine that requests reach with the version of the adapter that they are to have at least.

    So no order has to reach every engine before it counts: one that missed it, or was started since, carries it out
    when the first request asks for it.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self._versions: dict[str, Version] = {}  # by name: what the engine has
        # One change of a name at a time.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        version: Version | None,
        kind: OutputKind,
    ) -> AsyncGenerator[OutputDelta | RequestOutput | Exception, None]:
        """A request's outputs; an error that its sender is to hear of is the last item.

        kind   "final": the last output, whole, and before it what there is by then, at most once a second; else what is
               new, again and again
        """
        writer, report_at = OutputWriter(), 0.0
        kind = "cumulative" if kind == "final" else "delta"
        try:
            adapter = None if version is None else await self._brought(version)
            outputs = self.llm.generate(prompt, params, request_id, adapter, output_kind=kind)
            async with aclosing(outputs):
                async for output in outputs:
                    if kind == "delta":
                        yield writer.delta(output)
                    elif output.finished or time.monotonic() >= report_at:
                        report_at = time.monotonic() + SECONDS_BETWEEN_REPORTS
                        yield output
        except TOLD as error:
            yield portable(error)

    async def ask(self, method: str, *args: Any) -> Any:
        """The result of another method, or the error that whoever asked is to hear of."""
        try:
            return await getattr(self, method)(*args)
        except TOLD as error:
            return portable(error)

    async def bring(self, version: Version) -> None:
        """Have at least this version: requests that come after get it, those that run are finished as they began.

        Errors of `AsyncLLM.add_lora`: the engine then has what it had.
        """
        name = version.adapter.lora_name
        if self._has(version):
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._has(version):
                return
            is_new = name not in self._versions
            try:
                await self.llm.add_lora(replace(version.adapter, load_inplace=not is_new))
            except RuntimeError as error:
                # All that memory holds is in use: a new adapter comes when the first request has its turn.
                if not is_new or isinstance(error, EngineDeadError):
                    raise
            self._versions[name] = version

    async def forget(self, name: str) -> None:
        """Take an adapter out once its requests have ended; nothing for one that is not there."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if (version := self._versions.pop(name, None)) is not None:
                await self.llm.remove_lora(version.adapter.lora_int_id)

    async def call(self, function: Any, *args: Any) -> Any:
        """As `AsyncLLM.call`."""
        return await self.llm.call(function, *args)

    async def start(self) -> tuple[Any, Any]:
        """Configuration and tokenizer, for whoever stands in front."""
        return self.llm.config, self.llm.tokenizer

    async def check_health(self) -> None:
        """EngineDeadError when the engine has ended; Ray Serve then starts another replica."""
        await self.llm.check_health()

    def _has(self, version: Version) -> bool:
        own = self._versions.get(version.adapter.lora_name)
        return own is not None and own.number >= version.number

    async def _brought(self, version: Version) -> LoRARequest | str:
        """What the engine takes for it: the bare name of what it knows, since its folder may be another one soon."""
        await self.bring(version)
        name = version.adapter.lora_name
        return name if name in self.llm.adapter_names else self._versions[name].adapter
