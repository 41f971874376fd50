"""What several commands need."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from minivllm.lora.request import LoRARequest

console = Console()


def resolve_model(model: str | None) -> str:
    """The folder of the model asked for, which may be a Hugging Face id, or the demo model's."""
    if model is not None:
        from minivllm.assembly import model_folder

        return str(model_folder(model))
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
