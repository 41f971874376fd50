"""What an engine in another process may be asked, beside requests. Stands for the methods that a request of the kind
UTILITY may name (`EngineCoreRequestType` of vllm/v1/engine/__init__.py, v0.22.1).
"""

from collections.abc import Callable, Iterable
from typing import Any

from minivllm.engine.llm_engine import LLMEngine
from minivllm.serving.views import EngineView, describe, is_leaving, newest_steps

Function = Callable[..., Any]  # of the engine and of arguments that can be copied

CALLS: tuple[Function, ...] = (
    *(
        LLMEngine.add_lora,
        LLMEngine.remove_lora,
        LLMEngine.pin_lora,
        LLMEngine.unpin_lora,
        LLMEngine.list_loras,
    ),
    *(LLMEngine.get_tokenizer, describe, is_leaving, newest_steps, EngineView.of),
)


def by_name(calls: Iterable[Function]) -> dict[str, Function]:
    """Each under the name that it goes by between processes."""
    return {name_of(function): function for function in calls}


def name_of(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"
