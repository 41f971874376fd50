"""`minivllm inspect`: what an adapter is, and whether it fits."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from minivllm.assembly import mix, parts_of
from minivllm.commands.common import console, print_json, resolve_model
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig
from minivllm.core.request_queue import RequestQueues
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.lora.judging import JudgedAdapter, judge_adapter
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import MODELS


def registry_for(model: str, lora_config: LoRAConfig) -> AdapterRegistry:
    """An engine's on a CPU, without the engine. The model is built without its weights."""
    config = EngineConfig(ModelConfig(model), lora_config=lora_config)
    architecture, parts = config.model_config.architecture, parts_of(config)
    worker = LRUCacheWorkerLoRAManager(config, "cpu", make_source=parts.make_source, extensions=parts.lora)
    worker.create_lora_manager(MODELS[architecture.architecture](architecture, torch.float32, "meta"))
    return AdapterRegistry(RequestQueues(), worker, look_up_parts=parts.look_up_parts)


def source_for(model: str, lora_config: LoRAConfig) -> AdapterSource:
    """Where an engine on a CPU would get its adapters from."""
    return registry_for(model, lora_config).worker.source


def rank_of_mix(paths: Sequence[str], model: str, lora_config: LoRAConfig) -> int:
    """The rank of these adapters mixed. ValueError or FileNotFoundError where a request for the mix is refused."""
    registry = registry_for(model, lora_config)
    mixed = mix([(LoRARequest(path, number, path), 1.0) for number, path in enumerate(paths, 1)])
    return registry.worker.source.check(registry.compose(mixed)).rank


def describe(adapter: JudgedAdapter) -> dict[str, Any]:
    """Rank, scaling and size of an adapter, as far as they are known."""
    description: dict[str, Any] = {"path": adapter.folder}
    if adapter.helper:
        description |= {
            "rank": adapter.helper.ranks[-1],
            "alpha": adapter.helper.lora_alpha,
            "rslora": adapter.helper.use_rslora,
            "patterns": {"rank": adapter.helper.rank_pattern, "alpha": adapter.helper.alpha_pattern},
            "beside": adapter.helper.beside,
        }
    if adapter.tensors:
        description |= {
            "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in adapter.tensors.values()}),
            "file_bytes": adapter.file.stat().st_size,
        }
    if adapter.loras:
        targets = describe_targets(adapter.loras)
        description["rank"] = max(weights.rank for weights in adapter.loras.values())
        parameters = sum(target["parameters"] for target in targets.values())
        description |= {"parameters": parameters, "targets": targets}
    return description


def describe_targets(loras: dict[str, LoRALayerWeights]) -> dict[str, dict[str, Any]]:
    """Modules of the same name in all layers, e.g. `q_proj`, together."""
    groups: dict[str, list[LoRALayerWeights]] = defaultdict(list)
    for name, weights in loras.items():
        groups[name.rpartition(".")[2]].append(weights)
    return {
        name: {
            "modules": len(group),
            "ranks": sorted({weights.rank for weights in group}),
            "scalings": sorted({round(weights.scaling, 4) for weights in group}),
            "parameters": sum(tensor.numel() for weights in group for tensor in weights.tensors),
        }
        for name, group in sorted(groups.items())
    }


def run_inspect(
    path: str,
    model: str | None,
    lora_options: dict[str, Any],
    as_json: bool,
    mixed_with: Sequence[str] = (),
) -> bool:
    """Print the description and the verdict; True if the adapter fits.

    lora_options   of `LoRAConfig`: what the engine would be started with
    mixed_with     adapters that it is to be mixed with (`minivllm.mixes`)
    """
    folder, lora_config = resolve_model(model), LoRAConfig(**lora_options)
    adapter = judge_adapter(path, lora_config, partial(source_for, folder))
    mixed: dict[str, Any] = {"mixed_with": list(mixed_with)} if mixed_with else {}
    if mixed_with and not adapter.problems:
        with adapter.noting():
            mixed["rank_of_mix"] = rank_of_mix([path, *mixed_with], folder, lora_config)
    report = {
        **describe(adapter),
        **mixed,
        "model": folder,
        "fits": not adapter.problems,
        "reasons": adapter.problems,
    }
    if as_json:
        print_json(report)
    else:
        _show(report)
    return report["fits"]


def _show(report: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(report['path'])}[/]", highlight=False, soft_wrap=True)
    if "targets" in report:
        kind = "rsLoRA (alpha / sqrt(r))" if report["rslora"] else "LoRA (alpha / r)"
        console.print(
            f"{kind}, rank {report['rank']}, alpha {report['alpha']}, {', '.join(report['dtype'])}, "
            f"{report['parameters']:,} parameters, {report['file_bytes'] / 1e6:.1f} MB"
        )
        for name, value in report["beside"].items():
            console.print(f"{escape(name)} {escape(str(value))}", highlight=False, soft_wrap=True)
        console.print(_table(report["targets"]))
    if "rank_of_mix" in report:
        others = ", ".join(report["mixed_with"])
        console.print(
            f"mixed with {escape(others)}: rank {report['rank_of_mix']}", highlight=False, soft_wrap=True
        )
    model = escape(report["model"])
    if report["fits"]:
        console.print(f"[green]fits[/green] {model}", highlight=False, soft_wrap=True)
        return
    console.print(f"[red]does not fit[/red] {model}:", highlight=False, soft_wrap=True)
    for reason in report["reasons"]:
        console.print(f"- {escape(reason)}", highlight=False, soft_wrap=True)


def _table(targets: dict[str, dict[str, Any]]) -> Table:
    table = Table("target", "modules", "rank", "scaling", "parameters")
    for name, group in targets.items():
        table.add_row(
            escape(name),
            str(group["modules"]),
            ", ".join(map(str, group["ranks"])),
            ", ".join(map(str, group["scalings"])),
            f"{group['parameters']:,}",
        )
    return table
