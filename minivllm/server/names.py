"""The model names that requests use. Stands for vllm/entrypoints/openai/models/serving.py (v0.22.1)."""

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from minivllm.engine.async_llm import AsyncLLM
from minivllm.lora.io.by_name import find_by_name
from minivllm.lora.io.resolver import stable_id
from minivllm.lora.request import LoRARequest
from minivllm.server.errors import ApiError
from minivllm.server.keys import Holder
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

MOST_NAMES_SHOWN = 8


class ModelNames:
    """The base model's name, and those of the adapters that are served. vLLM: `OpenAIServingModels`.

    begin    is called with every name that is new

    served   name -> its adapter: those from the start, those loaded since, and those that a resolver found
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, begin: Callable[[str], None]) -> None:
        self.llm, self.settings, self.begin = llm, settings, begin
        self.served = {adapter.lora_name: adapter for adapter in settings.adapters}
        # One change of a name at a time.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load_all(self) -> None:
        """Read what is served from the start; what does not fit is refused before anybody asks for it."""
        for adapter in list(self.served.values()):
            await self.llm.add_lora(adapter)

    async def find(self, name: str, holder: Holder) -> LoRARequest | None:
        """The adapter of that name, None for the base model. vLLM: `resolve_lora`.

        holder   of the request's key: what it may not use, it is refused before anything is looked up

        What is not served is looked for by resolvers, has to lie below the root, and is read before anybody may use
        it. ApiError 404 for a name that nobody knows; errors of `AsyncLLM.add_lora`.
        """
        holder.check(name)
        if name == self.settings.model_name:
            return None
        if name in self.served:
            return self.served[name]
        async with self._lock(name):
            if name not in self.served:
                await self._resolve(name, holder)
            return self.served[name]

    async def _resolve(self, name: str, holder: Holder) -> None:
        try:  # in a thread: resolvers read disks
            found = await asyncio.to_thread(find_by_name, name, self._model(), self.served)
        except ValueError as error:
            logger.info("%s", error)
            raise self._unknown(name, holder) from None
        adapter = replace(found, lora_path=await self._allowed_path(found.lora_path))
        # All that memory holds may be in use: then the first request that has its turn brings it.
        with suppress(RuntimeError):
            await self.llm.add_lora(adapter)
        self._serve(adapter)

    async def load(self, order: LoadAdapterRequest) -> None:
        """Serve an adapter under a name once the engine has read it. vLLM: `load_lora_adapter`.

        ApiError 400 for a name that is taken, unless it is to be read again; as `below_root` for another place.
        Errors of `AsyncLLM.add_lora`: nothing has changed then.
        """
        name = order.lora_name
        async with self._lock(name):
            if name == self.settings.model_name:
                raise ApiError(400, f"'{name}' is the base model's name; give another one", "lora_name")
            if self.is_known(name) and not order.load_inplace:
                raise ApiError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True.",
                    "lora_name",
                )
            path = await self._allowed_path(order.lora_path)
            adapter = LoRARequest(name, stable_id(name), path, load_inplace=order.load_inplace)
            await self.llm.add_lora(adapter)
            self._serve(replace(adapter, load_inplace=False))

    async def unload(self, name: str) -> None:
        """Serve it no longer; requests that run end as they began. vLLM: `unload_lora_adapter`.

        ApiError 404 for a name that is not known.
        """
        async with self._lock(name):
            if not self.is_known(name):
                raise self._missing(name)
            self.served.pop(name, None)
            await self.llm.remove_lora(stable_id(name))

    def _serve(self, adapter: LoRARequest) -> None:
        self.served[adapter.lora_name] = adapter
        self.begin(adapter.lora_name)

    def for_engine(self, adapter: LoRARequest | None) -> LoRARequest | str | None:
        """What a request of it names: the bare name of what the engine knows.

        The adapter may be unloaded, or read again from elsewhere, before the engine takes the request. With a folder
        of before it would come back for good.
        """
        is_known = adapter is not None and adapter.lora_name in self._names_in_engine()
        return adapter.lora_name if is_known else adapter

    def is_known(self, name: str) -> bool:
        """Whether it is served, or the engine still has requests that brought it along."""
        return name in self.served or name in self._names_in_engine()

    def _names_in_engine(self) -> Collection[str]:
        registry = self.llm.engine.adapters
        return () if registry is None else registry.by_name

    def known(self, name: str) -> LoRARequest:
        """Of an adapter that is served. ApiError 404 for another name."""
        if name not in self.served:
            raise self._missing(name)
        return self.served[name]

    def _missing(self, name: str) -> ApiError:
        return ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")

    def visible(self, holder: Holder) -> list[str]:
        """The names that a request with this key may use, the base model's first."""
        return [name for name in (self.settings.model_name, *sorted(self.served)) if holder.may_use(name)]

    def _unknown(self, name: str, holder: Holder) -> ApiError:
        names = self.visible(holder)
        more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
        there_are = ", ".join(names[:MOST_NAMES_SHOWN])
        return ApiError(
            404, f"The model `{name[:100]}` does not exist; there are: {there_are}{more}", "model"
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _model(self) -> str:
        return self.llm.engine.config.model_config.model

    async def _allowed_path(self, path: str) -> str:
        if self.settings.lora_root is None:
            return path
        return await asyncio.to_thread(below_root, path, self.settings.lora_root)


def below_root(path: str, root: str) -> str:
    """Where an adapter's folder lies, all links followed. vLLM reads any path.

    path   absolute, or from the root on

    ApiError 400 if the folder, or a file in it, lies elsewhere; 404 if there is no such folder.
    """
    root = os.path.realpath(root)
    outside = ApiError(400, f"'{path[:200]}' does not lie below the server's --lora-root", "lora_path")
    try:
        folder = os.path.realpath(os.path.join(root, path))
    except ValueError:  # a null in it, or half a character
        raise outside from None
    if not is_below(folder, root):
        raise outside
    if not os.path.isdir(folder):
        raise ApiError(404, f"there is no adapter folder '{path[:200]}'", "lora_path")
    if not all(is_below(os.path.realpath(entry.path), root) for entry in os.scandir(folder)):
        raise outside
    return folder


def is_below(path: str, root: str) -> bool:
    """Both without links."""
    return path.startswith(os.path.join(root, ""))
