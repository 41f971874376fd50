"""`minivllm serve`: an OpenAI server for one model and its adapters."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minivllm.commands.adapter_folder import register_folder
from minivllm.commands.common import checkout_folder, resolve_model
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.processes import avoid_pauses
from minivllm.progress import Listener
from minivllm.server.app import build_app
from minivllm.server.run import DrainingServer, bind
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from minivllm.sources.resolver import stable_id

# Of the command's options those that `ServerSettings` takes as they are.
SETTINGS = ("lora_root", "allow_runtime_lora", "drain_seconds", "max_body_bytes", "max_concurrency")
MODULE_FORM = '{"name": ..., "path": ..., "base_model_name": ...}'
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "MINIVLLM_API_KEY"
# Variables of vLLM's server -> what stands for each here, and the option that somebody who knows that has given.
VLLM_VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("--allow-runtime-lora --lora-root FOLDER", "allow_runtime_lora"),
    "VLLM_LORA_RESOLVER_CACHE_DIR": ("--lora-root FOLDER", "lora_root"),
    "VLLM_API_KEY": (f"--api-key KEY or {KEY_VARIABLE}", "api_key"),
}


class AdapterModule(BaseModel):
    """An adapter as JSON. base_model_name: what `parent` in /v1/models says. vLLM: `LoRAModulePath`"""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str
    base_model_name: str | None = None


def run_serve(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Serve until a signal says otherwise. given: the command's options; options: of the engine."""
    settings = settings_of(given)
    socket = bind(
        given["host"], given["port"], settings.write_seconds
    )  # a port that is taken is said at once
    logging.getLogger("minivllm.access").setLevel(logging.INFO)
    console = Console(stderr=True)
    for sentence in vllm_variables(given):
        console.print(sentence, highlight=False, soft_wrap=True)
    with loading(console) as on_progress:
        llm = AsyncLLM.from_engine_args(
            EngineArgs(model=resolve_model(given["model"]), enable_lora=True, **options),
            max_queued=given["max_queued"],
            on_progress=on_progress,
        )
    try:
        app = build_app(llm, settings)
        avoid_pauses()
        asyncio.run(app.state.server.start())  # so that what cannot be served is said in one sentence
        host, port = socket.getsockname()[:2]
        names = ", ".join([settings.model_name, *(adapter.lora_name for adapter in settings.adapters)])
        console.print(f"Serving {names} at http://{host}:{port}/v1", highlight=False, soft_wrap=True)
        DrainingServer(app, settings, ends_with_engine=True).run([socket])
    finally:
        llm.shutdown()


@contextmanager
def loading(console: Console) -> Iterator[Listener]:
    """A bar of what the engine's process does; whom to tell of it."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Starting the engine", total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield on_progress


def settings_of(given: dict[str, Any]) -> ServerSettings:
    """ValueError or FileNotFoundError for options that contradict each other."""
    name = given["served_model_name"] or model_name(given["model"])
    keys = api_keys(given["api_key"])
    settings = ServerSettings(
        model_name=name,
        adapters=tuple(adapters_of(given["lora_modules"] or [], given["model"])),
        api_keys=tuple(keys),
        adapter_keys=dict(pair("--adapter-key", each, "NAME=KEY") for each in given["adapter_key"] or []),
        allowed_origins=tuple(given["allow_origin"] or []),
        allowed_hosts=allowed_hosts(given["host"], given["allow_host"] or [], bool(keys)),
        log_requests=not given["no_access_log"],
        **{name: given[name] for name in SETTINGS},
    )
    if given["base_model_name"] is not None and settings.lora_root is None:
        raise ValueError("--base-model-name is about the adapters below --lora-root; pass that too")
    register_folder(settings.lora_root, given["base_model_name"], given["model"])
    return settings


def model_name(model: str | None) -> str:
    """What requests call the base model if nobody says otherwise."""
    if model is None:
        from minivllm.models.demo_model import MODEL_NAME

        return MODEL_NAME
    return model


def adapters_of(specs: list[str], model: str | None) -> list[LoRARequest]:
    """`NAME=PATH` or vLLM's JSON each. `demo` stands for the four of the demo model that come with the repository."""
    if specs == ["demo"]:
        if model is not None:
            raise ValueError("--lora-modules demo are adapters of the demo model; leave MODEL out")
        folder = checkout_folder() / "adapters"
        specs = [f"{path.parent.name}={path.parent}" for path in sorted(folder.glob("*/adapter_config.json"))]
    return [adapter_of(spec) for spec in specs]


def adapter_of(spec: str) -> LoRARequest:
    """An adapter of `--lora-modules`. ValueError for what is not of one of both forms."""
    if not spec.lstrip().startswith("{"):
        name, path = pair("--lora-modules", spec, 'NAME=PATH or {"name": ..., "path": ...}')
        return LoRARequest(name, stable_id(name), path)
    try:
        module = AdapterModule.model_validate_json(spec)
    except ValidationError as error:
        raise ValueError(
            f"--lora-modules '{spec}' is not of the form {MODULE_FORM}: {error.errors()[0]['msg']}"
        ) from None
    return LoRARequest(
        module.name, stable_id(module.name), module.path, base_model_name=module.base_model_name
    )


def api_keys(given: list[str] | None) -> list[str]:
    """Those of the command line, or else the one in the environment, which other users' `ps` does not show."""
    if given:
        return given
    key = os.environ.get(KEY_VARIABLE)
    return [key] if key else []


def vllm_variables(given: dict[str, Any]) -> Iterator[str]:
    """Of each variable that would set up vLLM's server, that it changes nothing here: nobody should believe that a
    server asks for a key, or takes adapters, that does not."""
    for variable, (stands_for, option) in VLLM_VARIABLES.items():
        if os.environ.get(variable) and not given[option] and not (option == "api_key" and api_keys(None)):
            yield f"{variable} is not read here; give {stands_for}"


def allowed_hosts(host: str, more: list[str], has_keys: bool) -> tuple[str, ...]:
    """Names that requests may call the server by; () = any. Without a key, at an address of this machine alone, only
    this machine's: other sites' pages in a browser here reach it by theirs."""
    if has_keys or "*" in more or host not in LOOPBACK:
        return tuple(name.lower() for name in more if name != "*")
    return (*LOOPBACK, "[::1]", *(name.lower() for name in more))


def pair(option: str, text: str, form: str) -> tuple[str, str]:
    """A name and what it is given by "=". ValueError, which says the form, for anything else."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{option} '{text}' is not of the form {form}")
    return name, value
