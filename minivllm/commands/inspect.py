"""`minivllm inspect`: what an adapter is, and whether it fits."""

from collections import defaultdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from minivllm.commands.adapter_check import AdapterOnDisk, check_adapter
from minivllm.commands.common import console, print_json, resolve_model
from minivllm.config import LoRAConfig
from minivllm.lora.lora_weights import LoRALayerWeights


def describe(adapter: AdapterOnDisk) -> dict[str, Any]:
    """Rank, scaling and size of an adapter, as far as they are known."""
    description: dict[str, Any] = {"path": adapter.folder}
    if adapter.helper:
        description |= {
            "rank": adapter.helper.ranks[-1],
            "alpha": adapter.helper.lora_alpha,
            "rslora": adapter.helper.use_rslora,
            "patterns": {"rank": adapter.helper.rank_pattern, "alpha": adapter.helper.alpha_pattern},
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


def run_inspect(path: str, model: str | None, lora_options: dict[str, Any], as_json: bool) -> bool:
    """Print the description and the verdict; True if the adapter fits.

    lora_options   of `LoRAConfig`: what the engine would be started with
    """
    folder = resolve_model(model)
    adapter = check_adapter(path, folder, LoRAConfig(**lora_options))
    report = {
        **describe(adapter),
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
        console.print(_table(report["targets"]))
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
