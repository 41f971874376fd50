"""Routes of models and adapters: listing, loading, unloading and pinning them.

Stands for vllm/entrypoints/serve/lora/api_router.py and vllm/entrypoints/openai/models/api_router.py (v0.22.1).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import PlainTextResponse

from minivllm.errors import EngineDeadError
from minivllm.server.context import Call, Server
from minivllm.server.errors import ApiError
from minivllm.server.formatting import VERSION_HEADER
from minivllm.server.protocol import AdapterRequest, LoadAdapterRequest
from minivllm.server.routes import get, post
from minivllm.serving.calls import describe_adapters

STARTED = int(time.time())


class ModelNameConvertor(PathConvertor):
    """The rest of a path, with line feeds. Starlette's own "path" drops the last one: "sql%0A" would find "sql"."""

    regex = "(?s:.*)"


register_url_convertor("model_name", ModelNameConvertor())


async def models(call: Call) -> dict[str, Any]:
    """The base model and the adapters that this key may use."""
    return {"object": "list", "data": [card(call, name) for name in call.server.names.visible(call.holder)]}


async def model(call: Call) -> dict[str, Any]:
    """One model. vLLM has no route for it; the openai client calls it."""
    name = call.path_params["name"]
    await call.adapter(name)
    return card(call, name)


def card(call: Call, name: str) -> dict[str, Any]:
    """A model that is served, in OpenAI's format."""
    config = call.server.llm.config.model_config
    known = {"id": name, "object": "model", "created": STARTED, "owned_by": "minivllm"}
    adapter = call.server.names.served.get(name)
    if adapter is None:
        return {**known, "root": config.model, "parent": None, "max_model_len": config.max_model_len}
    parent = adapter.base_model_name or call.server.settings.model_name
    return {**known, "root": adapter.lora_path, "parent": parent}


async def adapters(call: Call) -> dict[str, Any]:
    """State, slot, pin, bytes, last use and version of each adapter."""
    known = await call.server.llm.call(describe_adapters)
    found = []
    for name, served in sorted(call.server.names.served.items()):
        if not call.holder.may_use(name):
            continue
        nothing = {
            "state": "known",
            "slot": None,
            "pinned": False,
            "bytes": None,
            "last_used": None,
            "version": 0,
        }
        found.append({"name": name, "path": served.lora_path, **nothing, **known.get(served.lora_int_id, {})})
    return {"object": "list", "data": found}


async def load(body: LoadAdapterRequest, call: Call) -> PlainTextResponse:
    """Load an adapter and serve it under a name. vLLM's body; a refused adapter is 400, where vLLM answers 500.

    An update's version is in the header `x-lora-version`.
    """
    server = changeable(call)
    with no_room_is_a_conflict():
        if body.is_update:
            version = await server.names.update(body)
            return success(body.lora_name, "updated", {VERSION_HEADER: str(version)})
        await server.names.load(body)
    return success(body.lora_name, "added")


async def unload(body: AdapterRequest, call: Call) -> PlainTextResponse:
    """Unload an adapter. The response comes when the requests that use it have finished."""
    server = changeable(call)
    await server.names.unload(body.lora_name)
    return success(body.lora_name, "removed")


async def pin(body: AdapterRequest, call: Call) -> PlainTextResponse:
    """Keep an adapter in a slot. vLLM has no route for it."""
    server = changeable(call)
    with no_room_is_a_conflict():
        await server.names.pin(body.lora_name)
    return success(body.lora_name, "pinned")


async def unpin(body: AdapterRequest, call: Call) -> PlainTextResponse:
    """Let a pinned adapter be evicted again."""
    server = changeable(call)
    await server.llm.unpin_lora(server.names.known(body.lora_name).lora_int_id)
    return success(body.lora_name, "unpinned")


def changeable(call: Call) -> Server:
    """The server. ApiError 403 if it does not allow changes of adapters, or this key does not."""
    call.holder.check_manages()
    if not call.server.settings.allow_runtime_lora:
        raise ApiError(
            403,
            "adapters cannot be changed; start the server with --allow-runtime-lora and --lora-root FOLDER",
        )
    if call.server.llm.config.lora_config is None:
        raise ApiError(400, "LoRA is off; start the server with adapters")
    return call.server


@contextmanager
def no_room_is_a_conflict() -> Iterator[None]:
    """ApiError 409 where all slots are pinned, or all adapters in memory are pinned or in use."""
    try:
        yield
    except EngineDeadError:  # a RuntimeError, too
        raise
    except RuntimeError as error:
        raise ApiError(409, str(error)) from error


def success(name: str, what: str, headers: dict[str, str] | None = None) -> PlainTextResponse:
    """vLLM's sentence."""
    text = f"Success: LoRA adapter '{name}' {what} successfully."
    return PlainTextResponse(text.encode("utf-8", "backslashreplace"), headers=headers)


ROUTES = (
    get("/v1/models", models),
    get("/v1/models/{name:model_name}", model),
    get("/v1/adapters", adapters),
    post("/v1/load_lora_adapter", LoadAdapterRequest, load),
    post("/v1/unload_lora_adapter", AdapterRequest, unload),
    post("/v1/pin_lora_adapter", AdapterRequest, pin),
    post("/v1/unpin_lora_adapter", AdapterRequest, unpin),
)
