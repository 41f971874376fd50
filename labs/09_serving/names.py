"""The names that requests may give as `model`, and the adapters behind them.

Stands for `OpenAIServingModels` of vllm/entrypoints/openai/models/serving.py (v0.22.1).
"""

from labs.kit.overlay import Todo
import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from minivllm.assembly import mix
from minivllm.lora.request import LoRARequest
from minivllm.server.errors import ApiError
from minivllm.server.keys import Holder
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.settings import ServerSettings, check_printable
from minivllm.serving.async_llm import AsyncLLM
from minivllm.sources.by_name import find_by_name
from minivllm.sources.resolver import stable_id

logger = logging.getLogger(__name__)

MOST_NAMES_SHOWN = 8


class ModelNames:
    """The base model's name and those of the adapters that are served; loads, unloads and resolves adapters.

    begin     is called with every new name, so that its metrics begin
    served    name -> its adapter: those from the start, those loaded since, and those that a resolver found
    leaving   names that are being unloaded: the engine finishes the requests that use them
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, begin: Callable[[str], None]) -> None:
        self.llm, self.settings, self.begin = llm, settings, begin
        self.served = {adapter.lora_name: adapter for adapter in settings.adapters}
        self.leaving: set[str] = set()
        # One change of a name at a time.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load_all(self) -> None:
        """Load the adapters of the settings, so that those that do not fit are refused before any request.

        ValueError, or FileNotFoundError if that was the first, with the sentences of all: a restart for each would be
        many.
        """
        errors: list[Exception] = []
        for adapter in list(self.served.values()):
            try:
                await self.llm.add_lora(adapter)
            except (ValueError, FileNotFoundError) as error:
                errors.append(error)
        if errors:
            kind = FileNotFoundError if isinstance(errors[0], FileNotFoundError) else ValueError
            raise kind("; ".join(dict.fromkeys(map(str, errors)))) from errors[0]

    # region lab 9.4: a name to an adapter
    async def find(self, name: str, holder: Holder) -> LoRARequest | None:
        """The adapter of that name, None for the base model. vLLM: `resolve_lora`.

        holder   the holder of the request's key, whose permission (`check`) comes before any look-up

        An adapter that is served is found at once, also while it is being reloaded. For any other name the resolvers
        are asked (`_resolve`), once for all concurrent requests: each takes the name's lock (`_lock`) and then looks
        again. ApiError 404 (`_unknown`) for a name that no resolver knows, and without asking them for one that is
        being unloaded (`leaving`); errors of `AsyncLLM.add_lora`.
        """
        raise Todo("lab 9.4: a name to an adapter")

    async def load(self, order: LoadAdapterRequest) -> None:
        """Serve an adapter under a name once the engine has loaded it. vLLM: `load_lora_adapter`.

        Its id is the name's `stable_id`, its folder what `_allowed_path` returns. All of this holds the name's lock
        (`_lock`). ApiError 400 for a name that is taken (`_check_free`). On errors of `AsyncLLM.add_lora` nothing has
        changed.

        A reload happens once, so the adapter that is served (`_serve`) has `load_inplace` off.
        """
        raise Todo("lab 9.4: a name to an adapter")

    async def unload(self, name: str) -> None:
        """Unload an adapter; its running requests finish first. vLLM: `unload_lora_adapter`, which waits for none.

        From the start no new request finds it, because it is `leaving` and no longer served. Then the engine removes
        it (`AsyncLLM.remove_lora`), also one that the engine knows and we do not serve, and this returns when it has.
        The name's lock is held until then (`_lock`), so that a load of the name, or another unload, waits. ApiError
        404 (`_missing`) for a name that is not known (`is_known`).
        """
        raise Todo("lab 9.4: a name to an adapter")

    def for_engine(self, adapter: LoRARequest | None) -> LoRARequest | str | None:
        """What a request gives the engine: the bare name of an adapter that it knows (`AsyncLLM.adapter_names`).

        The adapter may be unloaded, or reloaded from another folder, before the engine adds the request. A request
        that brings the old folder would load it again, for good.
        """
        raise Todo("lab 9.4: a name to an adapter")

    # endregion

    async def find_mix(self, model: str, weights: Mapping[str, float], holder: Holder) -> LoRARequest:
        """The mix of adapters with these names and weights, each found as by `find`.

        ApiError 400 beside another model than the base, and for the base in the mix. ValueError for weights that are no
        numbers, and as many adapters as no mix has.
        """
        if model != self.settings.model_name:
            raise ApiError(
                400,
                f"lora_mix names the adapters; give '{self.settings.model_name}' as model beside it",
                "model",
            )
        holder.check(model)  # a weight of 0 would be the base model's answer
        mix(weights.items())  # what is refused is refused before resolvers are asked
        found = []
        for name in weights:
            if (adapter := await self.find(name, holder)) is None:
                raise ApiError(
                    400, f"'{name}' in lora_mix is the base model; name adapters alone", "lora_mix"
                )
            found.append((self.for_engine(adapter), weights[name]))
        return mix(found)

    async def update(self, order: LoadAdapterRequest) -> int:
        """Replace an adapter's weights beside requests under way; the new version. ApiError 404: it is not served."""
        name = order.lora_name
        async with self._lock(name):
            adapter = self.known(name)
            path = await self._allowed_path(order.lora_path)
            await self.llm.add_lora(adapter)  # one of the start may have been refused room
            running = order.running or "finish"
            version = await self.llm.update_lora(name, path, version=order.lora_version, running=running)
            self._serve(replace(adapter, lora_path=path))
        return version

    async def pin(self, name: str) -> None:
        """Have the engine keep an adapter in a slot. ApiError 404 for a name that is not served.

        The engine pins adapters that it knows, so one without any request so far is loaded first.
        """
        async with self._lock(name):
            adapter = self.known(name)
            await self.llm.add_lora(adapter)
            await self.llm.pin_lora(adapter.lora_int_id)

    def known(self, name: str) -> LoRARequest:
        """The adapter that is served under a name. ApiError 404 for any other name."""
        if name not in self.served:
            raise self._missing(name)
        return self.served[name]

    def is_known(self, name: str) -> bool:
        """Whether an adapter is served under the name, or the engine still has requests that brought it along."""
        return name in self.served or name in self.llm.adapter_names

    def visible(self, holder: Holder) -> list[str]:
        """The names that a request with this key may use, the base model's first."""
        return [name for name in (self.settings.model_name, *sorted(self.served)) if holder.may_use(name)]

    def check_served(self, name: str, holder: Holder) -> None:
        """ApiError 404 for a name that is no longer served, as a new request would get."""
        if name not in (self.settings.model_name, *self.served):
            raise self._unknown(name, holder)

    def _serve(self, adapter: LoRARequest) -> None:
        self.served[adapter.lora_name] = adapter
        self.begin(adapter.lora_name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _check_free(self, order: LoadAdapterRequest) -> None:
        """ApiError 400 for a name that cannot be printed, or that is taken and is not to be loaded again."""
        name = order.lora_name
        try:
            check_printable(name)
        except ValueError as error:
            raise ApiError(400, str(error), "lora_name") from None
        if name == self.settings.model_name:
            raise ApiError(400, f"'{name}' is the base model's name; give another one", "lora_name")
        if self.is_known(name) and not order.load_inplace:
            raise ApiError(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                "lora_name",
            )

    async def _resolve(self, name: str, holder: Holder) -> None:
        """Serve the adapter that a resolver finds. It must lie below the root, and is loaded before it is served."""
        model = self.llm.config.model_config.model
        try:  # in a thread: resolvers read disks
            found = await asyncio.to_thread(find_by_name, name, model, self.served)
        except ValueError as error:
            logger.info("%s", error)
            raise self._unknown(name, holder) from None
        adapter = replace(found, lora_path=await self._allowed_path(found.lora_path))
        # All adapters in memory may be in use: the first request that is scheduled then loads it.
        with suppress(RuntimeError):
            await self.llm.add_lora(adapter)
        self._serve(adapter)

    async def _allowed_path(self, path: str) -> str:
        """The folder that a path leads to, if there is no root or it lies below it (`below_root`)."""
        if self.settings.lora_root is None:
            return path
        return await asyncio.to_thread(below_root, path, self.settings.lora_root)

    def _missing(self, name: str) -> ApiError:
        return ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")

    def _unknown(self, name: str, holder: Holder) -> ApiError:
        names = self.visible(holder)
        more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
        there_are = ", ".join(names[:MOST_NAMES_SHOWN])
        return ApiError(
            404, f"The model `{name[:100]}` does not exist; there are: {there_are}{more}", "model"
        )


def below_root(path: str, root: str) -> str:
    """The real path of an adapter's folder, all links followed. vLLM reads any path.

    path   absolute, or relative to the root

    ApiError 400 if the folder, or a file in it, lies elsewhere; 404 if there is no such folder.
    """
    root = os.path.realpath(root)

    def is_below(real: str) -> bool:
        return real.startswith(os.path.join(root, ""))

    outside = ApiError(400, f"'{path[:200]}' does not lie below the server's --lora-root", "lora_path")
    try:
        folder = os.path.realpath(os.path.join(root, path))
    except ValueError:  # a null in it, or half a character
        raise outside from None
    if not is_below(folder):
        raise outside
    if not os.path.isdir(folder):
        raise ApiError(404, f"there is no adapter folder '{path[:200]}'", "lora_path")
    if not all(is_below(os.path.realpath(entry.path)) for entry in os.scandir(folder)):
        raise outside
    return folder
