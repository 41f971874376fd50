"""The state of a server, and of one HTTP request, as handlers get them.

Stands for `init_app_state` of vllm/entrypoints/openai/api_server.py (v0.22.1).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from minivllm.lora.request import LoRARequest
from minivllm.server.access_log import Record
from minivllm.server.errors import ApiError
from minivllm.server.keys import Holder
from minivllm.server.metrics import ServerMetrics
from minivllm.server.names import ModelNames
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM


@dataclass
class Server:
    """The state of one server.

    is_draining   it finishes its requests and takes no new ones
    has_started   the adapters of the settings have been loaded
    """

    llm: AsyncLLM
    settings: ServerSettings
    names: ModelNames
    metrics: ServerMetrics
    is_draining: bool = False
    has_started: bool = False

    @classmethod
    def of(cls, llm: AsyncLLM, settings: ServerSettings) -> "Server":
        names = [adapter.lora_name for adapter in settings.adapters]
        metrics = ServerMetrics(settings.model_name, names, settings.most_labels)
        return cls(llm, settings, ModelNames(llm, settings, metrics.serve), metrics)

    async def start(self) -> None:
        """Load the adapters of the settings, before the first request and once.

        ValueError or FileNotFoundError for an adapter that cannot be served.
        """
        if self.has_started:
            return
        self.has_started = True
        await self.llm.watch_adapters(self.metrics.adapter_events)
        await self.names.load_all()


@dataclass
class Call:
    """One HTTP request.

    receive       of ASGI: the messages after the body
    holder        what the request's key permits
    path_params   the named parts of the path
    asked         the names of models that it has asked for: one, or those of a mix
    """

    receive: Receive
    server: Server
    holder: Holder
    record: Record
    path_params: Mapping[str, Any]
    asked: tuple[str, ...] = ()

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> "Call":
        """The request of a scope that `AccessLog`, `KeyCheck` and a route have filled in."""
        state, server = scope["state"], scope["app"].state.server
        return cls(receive, server, state["holder"], state["record"], scope["path_params"])

    async def adapter(self, model: str, lora_mix: Mapping[str, float] | None = None) -> LoRARequest | None:
        """The adapter of the model that the request names, or a mix of several; errors as in `ModelNames.find` and
        `find_mix`."""
        self.record.model, self.asked = model, (model,)
        if lora_mix is None:
            return await self.server.names.find(model, self.holder)
        self.asked = tuple(lora_mix)
        adapter = await self.server.names.find_mix(model, lora_mix, self.holder)
        self.record.model = adapter.lora_name
        return adapter

    @property
    def is_mixed(self) -> bool:
        """Whether its adapter is a mix, which has the names of its parts as the engine knows them."""
        return self.record.model not in self.asked

    async def tokenizer(self, adapter: LoRARequest | None) -> Any:
        """The tokenizer for an adapter's texts. ApiError 400 for a server without one."""
        if self.server.llm.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: prompts are token ids")
        return await self.server.llm.get_tokenizer(adapter)


def new_id(prefix: str) -> str:
    """A random id for one HTTP request."""
    return f"{prefix}-{secrets.token_hex(16)}"
