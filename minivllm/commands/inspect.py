"""`minivllm inspect`: what an adapter is, and whether it fits."""

from collections import defaultdict
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from minivllm.commands.common import console, print_json, resolve_model
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig
from minivllm.lora.lora_model import LoRAModel, find_weights_file, read_weights
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import MODELS


def describe(path: str) -> dict[str, Any]:
    """Rank, targets, scaling and size of an adapter folder. ValueError or OSError if it cannot be read."""
    folder = get_adapter_absolute_path(path)
    helper = PEFTHelper.from_local_dir(folder)
    weights = find_weights_file(folder)
    tensors = read_weights(weights)
    lora = LoRAModel.from_lora_tensors(1, tensors, helper)
    groups: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"modules": 0, "ranks": set(), "scalings": set(), "parameters": 0}
    )
    for name, module in lora.loras.items():
        group = groups[name.rpartition(".")[2]]
        group["modules"] += 1
        group["ranks"].add(module.rank)
        group["scalings"].add(round(module.scaling, 4))
        group["parameters"] += module.lora_a.numel() + module.lora_b.numel()
    return {
        "path": folder,
        "rank": lora.rank,
        "alpha": helper.lora_alpha,
        "rslora": helper.use_rslora,
        "patterns": {"rank": helper.rank_pattern, "alpha": helper.alpha_pattern},
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}),
        "file_bytes": weights.stat().st_size,
        "parameters": sum(group["parameters"] for group in groups.values()),
        "targets": {
            name: {**group, "ranks": sorted(group["ranks"]), "scalings": sorted(group["scalings"])}
            for name, group in sorted(groups.items())
        },
    }


def why_not(path: str, model: str, max_lora_rank: int) -> str | None:
    """The reason why the engine would refuse the adapter for this model, or None if it would serve it.

    The model is built without its weights: shapes are all that is needed.
    """
    config = EngineConfig(ModelConfig(model), lora_config=LoRAConfig(max_lora_rank=max_lora_rank))
    architecture = config.model_config.architecture
    manager = LRUCacheWorkerLoRAManager(config, "cpu")
    manager.create_lora_manager(MODELS[architecture.architecture](architecture, torch.float32, "meta"))
    try:
        manager.check_adapter(LoRARequest(path, 1, path))
    except (ValueError, OSError) as error:
        return str(error)
    return None


def run_inspect(path: str, model: str | None, max_lora_rank: int, as_json: bool) -> bool:
    """Print the description and the verdict; True if the adapter fits."""
    folder = resolve_model(model)
    reason = why_not(path, folder, max_lora_rank)
    try:
        description = describe(path)
    except (ValueError, OSError) as error:
        description = {"path": path}
        reason = reason or str(error)
    report = {**description, "model": folder, "fits": reason is None, "reason": reason}
    if as_json:
        print_json(report)
    else:
        _show(report)
    return reason is None


def _show(report: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(report['path'])}[/]", highlight=False)
    if "targets" in report:
        kind = "rsLoRA (alpha / sqrt(r))" if report["rslora"] else "LoRA (alpha / r)"
        console.print(
            f"{kind}, rank {report['rank']}, alpha {report['alpha']}, {', '.join(report['dtype'])}, "
            f"{report['parameters']:,} parameters, {report['file_bytes'] / 1e6:.1f} MB"
        )
        table = Table("target", "modules", "rank", "scaling", "parameters")
        for name, group in report["targets"].items():
            table.add_row(
                escape(name),
                str(group["modules"]),
                ", ".join(map(str, group["ranks"])),
                ", ".join(map(str, group["scalings"])),
                f"{group['parameters']:,}",
            )
        console.print(table)
    model = escape(report["model"])
    if report["fits"]:
        console.print(f"[green]fits[/green] {model}", highlight=False)
    else:
        console.print(f"[red]does not fit[/red] {model}: {escape(report['reason'])}", highlight=False)
