"""The model names that requests use. Stands for vllm/entrypoints/openai/models/serving.py (v0.22.1)."""

from labs.kit.overlay import Todo
import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from minivllm.lora.request import LoRARequest
from minivllm.server.keys import Holder
from minivllm.server.paths import below_root
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.served import ServedNames
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from minivllm.sources.by_name import find_by_name
from minivllm.sources.resolver import stable_id

logger = logging.getLogger(__name__)


class ModelNames(ServedNames):
    """The names that are served, and how they come and go. vLLM: `OpenAIServingModels`.

    leaving   names that are being unloaded: the engine finishes the requests that use them
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, begin: Callable[[str], None]) -> None:
        super().__init__(llm, settings, begin)
        self.leaving: set[str] = set()
        # One change of a name at a time.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load_all(self) -> None:
        """Read what is served from the start; what does not fit is refused before anybody asks for it."""
        for adapter in list(self.served.values()):
            await self.llm.add_lora(adapter)

    # region lab 9.4: a name to an adapter
    async def find(self, name: str, holder: Holder) -> LoRARequest | None:
        """The adapter of that name, None for the base model. vLLM: `resolve_lora`.

        holder   of the request's key: what it may not use (`check`), it is refused before anything is looked up

        What is served is found at once, also while it is read again. What is not is looked for by resolvers
        (`_resolve`): once, however many ask for it at the same time (`_lock`), and whoever waited looks again.
        ApiError 404 (`_unknown`) for a name that nobody knows, and at once for one that is being unloaded (`leaving`);
        errors of `AsyncLLM.add_lora`.
        """
        raise Todo("lab 9.4: a name to an adapter")

    async def load(self, order: LoadAdapterRequest) -> None:
        """Serve an adapter under a name once the engine has read it. vLLM: `load_lora_adapter`.

        Its id is the name's `stable_id`, its folder what `_allowed_path` says. ApiError 400 for a name that is taken
        (`_check_free`). Errors of `AsyncLLM.add_lora`: nothing has changed then. No other change of the name comes
        between (`_lock`).

        An order to read it again is carried out once: what is served (`_serve`) has `load_inplace` off.
        """
        raise Todo("lab 9.4: a name to an adapter")

    async def unload(self, name: str) -> None:
        """Serve it no longer; requests that run end as they began. vLLM: `unload_lora_adapter`, which waits for nobody.

        From the first moment on nobody finds it: it is `leaving`, and no longer served. Then the engine takes it out
        (`AsyncLLM.remove_lora`), also what it knows without our serving it, and it is done when that is. A load of the
        name, or another unload, waits for it (`_lock`). ApiError 404 (`_missing`) for a name that is not known
        (`is_known`).
        """
        raise Todo("lab 9.4: a name to an adapter")

    def for_engine(self, adapter: LoRARequest | None) -> LoRARequest | str | None:
        """What a request of it names: the bare name of what the engine knows (`AsyncLLM.adapter_names`).

        The adapter may be unloaded, or read again from elsewhere, before the engine takes the request. With a folder
        of before it would come back for good.
        """
        raise Todo("lab 9.4: a name to an adapter")

    # endregion

    async def pin(self, name: str) -> None:
        """Have the engine keep an adapter in a slot. ApiError 404 for a name that is not served.

        The engine pins what it knows, so an adapter that nobody has asked for yet is read first.
        """
        async with self._lock(name):
            adapter = self.known(name)
            await self.llm.add_lora(adapter)
            await self.llm.pin_lora(adapter.lora_int_id)

    async def _resolve(self, name: str, holder: Holder) -> None:
        """Serve what a resolver finds; it has to lie below the root, and is read before anybody may use it."""
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

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _model(self) -> str:
        return self.llm.config.model_config.model

    async def _allowed_path(self, path: str) -> str:
        if self.settings.lora_root is None:
            return path
        return await asyncio.to_thread(below_root, path, self.settings.lora_root)
