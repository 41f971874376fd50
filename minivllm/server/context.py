"""What the handlers of one server share. Stands for `init_app_state` of vllm/entrypoints/openai/api_server.py."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Receive, Scope

from minivllm.engine.input_processor import Prompt
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.server.errors import ApiError
from minivllm.server.generation import Generation
from minivllm.server.keys import Holder
from minivllm.server.metrics import ServerMetrics
from minivllm.server.names import ModelNames
from minivllm.server.record import Record
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM


@dataclass
class Server:
    """One server.

    is_draining   it is about to end, and takes nothing new
    has_started   its adapters are read
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
        """Before the first request; once. ValueError or FileNotFoundError for an adapter that cannot be served."""
        if self.has_started:
            return
        self.has_started = True
        await self.llm.watch_adapters(self.metrics.adapter_events)
        await self.names.load_all()


@dataclass
class Call:
    """One HTTP request and whoever sent it.

    receive       of ASGI: what comes behind the body
    path_params   what stands in the path where its route has a name
    """

    receive: Receive
    server: Server
    holder: Holder
    record: Record
    path_params: Mapping[str, Any]

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> "Call":
        """Of a request that has come through `AccessLog`, `KeyCheck` and a route."""
        state, server = scope["state"], scope["app"].state.server
        return cls(receive, server, state["holder"], state["record"], scope["path_params"])

    async def adapter(self, model: str) -> LoRARequest | None:
        """Of the model that the request names; errors as in `ModelNames.find`."""
        self.record.model = model
        return await self.server.names.find(model, self.holder)

    async def tokenizer(self, adapter: LoRARequest | None) -> Any:
        """For the adapter's texts. ApiError 400 for a server of token ids only."""
        if self.server.llm.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: prompts are token ids")
        return await self.server.llm.get_tokenizer(adapter)

    def generation(
        self, request_id: str, prompts: list[Prompt], params: SamplingParams, adapter: LoRARequest | None
    ) -> Generation:
        """The engine's part of the request."""
        server, model = self.server, self.record.model
        lora = server.names.for_engine(adapter)
        check_served = partial(server.names.check_served, model, self.holder)
        told = server.metrics, self.record
        return Generation(server.llm, *told, request_id, prompts, params, model, lora, check_served)


def new_id(prefix: str) -> str:
    """For one HTTP request."""
    return f"{prefix}-{secrets.token_hex(16)}"
