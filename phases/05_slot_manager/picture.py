"""Draws picture.svg: six steps of a manager with two slots and memory for three adapters."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labs.kit.regions import ROOT
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.llama import LlamaForCausalLM

COLOURS = {"json": "#0072B2", "sql": "#E69F00", "bullets": "#009E73", "dates": "#CC79A7"}
NAMES = ["base", *COLOURS]  # an adapter's id is its place here
STEPS = [["json", "sql"], ["json"], ["json", "bullets"], ["sql"], ["dates"], ["json", "sql"]]
SLOTS, MEMORY = 2, 3
INK, MUTED = "#222222", "#666666"
COLUMN, WIDTH, ROW = 1.5, 1.22, 0.62
WORDS = {"load": "read", "activate": "copy", "evict": "evict", "drop": "drop"}


class Zeros(AdapterSource):
    """Adapters of zeros instead of folders: the picture is of who is where."""

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        return self.manager.create_dummy_lora(lora_request.lora_int_id, 1)


def make_worker() -> LRUCacheWorkerLoRAManager:
    config = EngineConfig(
        ModelConfig(str(ROOT / "benchmarks" / "shapes" / "tiny"), dtype="float32"),
        lora_config=LoRAConfig(max_loras=SLOTS, max_cpu_loras=MEMORY),
    )
    worker = LRUCacheWorkerLoRAManager(config, "cpu")
    worker.create_lora_manager(LlamaForCausalLM(config.model_config.architecture, torch.float32))
    worker.read_through(lambda source: Zeros(source.manager))
    return worker


def draw_box(axes: Axes, x: float, y: float, name: str | None, *, is_used: bool) -> None:
    """A place: full if this step uses who is there, pale if not, an outline if nobody is."""
    style = {"facecolor": "white", "edgecolor": "#bbbbbb", "linestyle": "--"}
    if name is not None:
        style = {"facecolor": COLOURS[name], "edgecolor": "none", "alpha": 1 if is_used else 0.35}
    axes.add_patch(FancyBboxPatch((x, y - 0.2), WIDTH, 0.4, boxstyle="round,pad=0.03", **style))
    text = {"color": "white", "fontweight": "bold"} if is_used else {"color": INK}
    axes.text(x + WIDTH / 2, y, name or "", ha="center", va="center", fontsize=9.5, **text)


def draw_step(axes: Axes, x: float, number: int, names: list[str], worker: LRUCacheWorkerLoRAManager) -> None:
    """A column: what the step wants, both tiers after it, and what the manager did for it."""
    requests = [LoRARequest(name, NAMES.index(name), name) for name in names]
    worker.set_active_adapters(requests, None)
    manager = worker.manager
    slots = [NAMES[i] if i else None for i in manager.lora_index_to_id]
    memory = [NAMES[i] for i in reversed(manager.list_adapters())]
    axes.text(x + WIDTH / 2, 0.45, f"step {number}", ha="center", fontsize=10, fontweight="bold", color=INK)
    axes.text(x + WIDTH / 2, 0.12, ", ".join(names), ha="center", fontsize=9, color=INK)
    for i, name in enumerate(slots):
        draw_box(axes, x, -0.45 - ROW * i, name, is_used=name in names)
    for i, name in enumerate([*memory, *[None] * MEMORY][:MEMORY]):
        draw_box(axes, x, -2.35 - ROW * i, name, is_used=name in names)
    events = manager.stats.drain_events()
    done = "\n".join(f"{WORDS[event.kind]} {NAMES[event.adapter_id]}" for event in events)
    done = done or "nothing to move"
    axes.text(x + WIDTH / 2, -4.35, done, ha="center", va="top", fontsize=8.5, color=INK, linespacing=1.35)


def draw_side(axes: Axes, y: float, title: str, note: str) -> None:
    axes.text(-0.15, y, title, ha="right", va="center", fontsize=10, fontweight="bold", color=INK)
    axes.text(-0.15, y - 0.12, note, ha="right", va="top", fontsize=8.5, color=MUTED, linespacing=1.3)


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "minivllm"
    worker = make_worker()
    figure = Figure(figsize=(10, 4.9), facecolor="white")
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.97))
    axes.set(xlim=(-1.95, COLUMN * len(STEPS)), ylim=(-5.35, 0.85))
    axes.axis("off")
    draw_side(axes, 0.2, "the step wants", "")
    draw_side(axes, -0.55, "slots", f"\nmax_loras = {SLOTS}")
    draw_side(axes, -2.7, "memory", f"\nmax_cpu_loras = {MEMORY}\nused last on top")
    draw_side(axes, -4.45, "done for it", "")
    for y in (-1.65, -4.1):
        axes.plot((-1.9, COLUMN * len(STEPS)), (y, y), color="#dddddd", linewidth=0.8)
    for number, names in enumerate(STEPS, start=1):
        draw_step(axes, COLUMN * (number - 1) + 0.1, number, names, worker)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
