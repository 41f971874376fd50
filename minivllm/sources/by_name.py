"""An adapter asked for by a name that the engine does not know: resolvers find it.

Stands for `resolve_lora` of vllm/entrypoints/openai/models/serving.py (v0.22.1).
"""

import asyncio
from collections.abc import Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from minivllm.lora.request import LoRARequest
from minivllm.sources.resolver import LoRAResolverRegistry


def find_by_name(lora_name: str, base_model_name: str, known: Collection[str]) -> LoRARequest:
    """The adapter that a resolver finds under that name. vLLM: in `OpenAIServingModels.resolve_lora`.

    known   names of the adapters that the engine has, for the error

    Every resolver is asked in turn, and the first answer counts. The caller registers the adapter with its request,
    so that the next request for the name asks nobody.

    Raises ValueError for a name that nobody knows, and when a resolver fails or answers something else.
    """
    for resolver_name in list(LoRAResolverRegistry.get_supported_resolvers()):
        answer = _ask(resolver_name, base_model_name, lora_name)
        if answer is not None:
            return replace(answer, lora_name=lora_name)
    raise ValueError(_unknown(lora_name, known))


def _ask(resolver_name: str, base_model_name: str, lora_name: str) -> LoRARequest | None:
    resolver = LoRAResolverRegistry.get_resolver(resolver_name)
    try:
        answer = _run(resolver.resolve_lora(base_model_name, lora_name))
    # A resolver is other people's code: it may raise anything, also what a task that was cancelled leaves it.
    except (Exception, asyncio.CancelledError) as error:
        raise ValueError(
            f"LoRA resolver '{resolver_name}' failed at adapter '{lora_name}': "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, LoRARequest | None):
        raise ValueError(
            f"LoRA resolver '{resolver_name}' must answer a LoRARequest or None for adapter '{lora_name}', "
            f"got {answer!r}"
        )
    return answer


def _run(coroutine: Coroutine[Any, Any, LoRARequest | None]) -> LoRARequest | None:
    """The coroutine's result, for code that is not async itself.

    In a notebook a loop runs in this thread already, and no other can run in it: then another thread runs one.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _unknown(lora_name: str, known: Collection[str]) -> str:
    names = sorted(known)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    asked = ", ".join(LoRAResolverRegistry.get_supported_resolvers())
    return (
        f"adapter '{lora_name}' is unknown (known: {', '.join(names[:8]) or 'none'}{more}; resolvers asked: "
        f"{asked or 'none'}); give a LoRARequest with its folder, or register a resolver that finds it"
    )
