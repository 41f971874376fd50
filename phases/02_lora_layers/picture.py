"""Draws picture.svg: one wrapped qkv_proj of the demo model with the four demo adapters in its slots, to scale."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minivllm.config import LoRAConfig
from minivllm.layers.linear import QKVParallelLinear
from minivllm.lora.layers import BaseLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import from_layer

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE.parents[1] / "adapters"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYER = 25
BASE = "#9aa0a6"
COLOURS = {"json": "#0072B2", "sql": "#E69F00", "bullets": "#009E73", "dates": "#CC79A7"}
INK, EMPTY, EDGE = "#222222", "#f4f4f4", "#b8b8b8"
GAP = 26  # between the parts q, k and v
ROOM = 170  # left of the buffers, for their labels


def wrapped_layer() -> BaseLayerWithLoRA:
    base = QKVParallelLinear(576, head_size=64, total_num_heads=9, total_num_kv_heads=3, bias=False)
    config = LoRAConfig(max_loras=len(COLOURS), max_lora_rank=32, lora_dtype=torch.float32)
    layer = from_layer(base, config.max_loras, config, ["q_proj", "k_proj", "v_proj"])
    for slot, name in enumerate(COLOURS):
        folder = str(ADAPTERS / name)
        helper = PEFTHelper.from_local_dir(folder)
        lora = LoRAModel.from_local_checkpoint(folder, LINEARS, helper, lora_model_id=slot + 1)
        parts = [lora.get_lora(f"model.layers.{LAYER}.self_attn.{part}_proj") for part in "qkv"]
        layer.set_lora(slot, [p and p.lora_a for p in parts], [p and p.lora_b for p in parts])
    return layer


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = "none") -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=0.6))


def draw(axes: Axes, layer: BaseLayerWithLoRA) -> None:
    slots, _, rank, k = layer.lora_a_stacked[0].shape
    at_b, at_a = k + ROOM, k + ROOM + slots * (rank + 4) + ROOM
    top = 0
    for i, (part, width) in enumerate(zip("qkv", layer.output_slices)):
        middle = top + width / 2
        box(axes, 0, top, k, width, BASE)
        axes.text(k / 2, middle, f"{part}: {width} x {k}", ha="center", va="center", fontsize=10)
        axes.text(at_b - 12, middle, f"B of {part}", ha="right", va="center", fontsize=10)
        axes.text(at_a - 12, middle, f"A of {part}", ha="right", va="center", fontsize=10)
        first_row = middle - slots * (rank + 4) / 2
        for slot, colour in enumerate(COLOURS.values()):
            live = layer.slots.live_ranks[i][slot]
            x, y = at_b + slot * (rank + 4), first_row + slot * (rank + 4)
            box(axes, x, top, rank, width, EMPTY, EDGE)
            box(axes, x, top, live, width, colour)
            box(axes, at_a, y, k, rank, EMPTY, EDGE)
            box(axes, at_a, y, k, live, colour)
            axes.text(at_a + k + 10, y + rank / 2, f"slot {slot}", va="center", fontsize=8)
        top += width + GAP
    axes.text(k / 2, -20, "base weight, as it was", ha="center", fontsize=10)
    axes.text(at_b - 12, -20, "slot", ha="right", fontsize=10)
    for slot in range(slots):
        axes.text(at_b + slot * (rank + 4) + rank / 2, -20, str(slot), ha="center", fontsize=10)
    axes.text(at_a + k / 2, -20, f"room for rank {rank} in every slot", ha="center", fontsize=10)
    for slot, (name, colour) in enumerate(COLOURS.items()):
        ranks = ", ".join(str(ranks[slot]) for ranks in layer.slots.live_ranks)
        text = f"slot {slot}  {name}: live ranks of q, k, v {ranks}"
        x = (0, at_b - ROOM / 2)[slot % 2]
        y = top + 36 + 44 * (slot // 2)
        box(axes, x, y - 15, 30, 30, colour)
        axes.text(x + 44, y, text, va="center", fontsize=10, color=INK)
    axes.set(xlim=(-8, at_a + k + 90), ylim=(top + 110, -60), aspect="equal")
    axes.axis("off")


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "minivllm"
    figure, axes = plt.subplots(figsize=(10, 6.6), layout="constrained")
    draw(axes, wrapped_layer())
    figure.savefig(HERE / "picture.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
