"""What several commands need."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from minivllm.lora.request import LoRARequest

console = Console()

# What the engine is started with, as commands and `EngineArgs` both call it.
ENGINE_OPTIONS = (
    *(
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "bias_enabled",
        "lora_extra_vocab_size",
        "refuse_pickles",
    ),
    *("device", "dtype", "quantization", "threads", "load_format", "max_model_len"),
    *("eviction_policy", "scheduling_policy", "tensor_parallel_size", "disable_custom_all_reduce"),
)


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Of a command's options, by name, those that `EngineArgs` takes."""
    options = {name: given[name] for name in ENGINE_OPTIONS if name in given}
    if "punica" in given:
        options["punica_backend"] = given["punica"]
    if "long_lora_scaling_factors" in given:
        options["long_lora_scaling_factors"] = parse_factors(given["long_lora_scaling_factors"])
    return options


def resolve_model(model: str | None) -> str:
    """The model folder asked for, or the demo model's."""
    if model is not None:
        return model
    from minivllm.models.demo_model import demo_model_path

    return str(demo_model_path())


def parse_adapters(specs: list[str]) -> dict[str, LoRARequest]:
    """`NAME=PATH` each; ids by position, from 1. ValueError for a malformed or repeated one."""
    adapters: dict[str, LoRARequest] = {}
    for number, spec in enumerate(specs, 1):
        name, equals, path = spec.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--adapter '{spec}' is not of the form NAME=PATH")
        if name in adapters or name == "base":
            raise ValueError(f"--adapter name '{name}' is taken; give every adapter a name of its own")
        adapters[name] = LoRARequest(name, number, path)
    return adapters


def parse_factors(text: str | None) -> tuple[float, ...] | None:
    """`2.0,4.0` as numbers, None as it is. ValueError for what is no number."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(
            f"--long-lora-scaling-factors '{text}' is not of the form 2.0,4.0 (numbers with commas between)"
        ) from None


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def checkout_folder() -> Path:
    """Where the repository lies; ValueError when the package runs without it."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "adapters" / "recipe").is_dir():
        raise ValueError(
            "this command needs the repository (it uses adapters/, examples/ or benchmarks/); run it from a checkout"
        )
    return folder


def from_checkout(module: str) -> Any:
    """A module of the repository that no wheel has, such as `examples.demo`; errors as in `checkout_folder`."""
    if (folder := str(checkout_folder())) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)
