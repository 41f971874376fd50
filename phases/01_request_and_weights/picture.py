"""Draws picture.svg: an adapter beside the weight it changes, and the scaling of every module of one adapter."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE.parents[1] / "adapters"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = 30
BASE, JSON, SQL = "#9aa0a6", "#0072B2", "#E69F00"
# Of a scaling; 2 is what the json adapter's config gives a module that no pattern names.
SHADES = {1.0: "#9ecae1", 2.0: "#f2f2f2", 3.0: JSON, 0.667: "#deebf7"}


def load(name: str) -> LoRAModel:
    folder = str(ADAPTERS / name)
    helper = PEFTHelper.from_local_dir(folder)
    return LoRAModel.from_local_checkpoint(folder, LINEARS, helper, lora_model_id=1)


def draw_sizes(axes: Axes, lora: LoRAModel) -> None:
    """W, B and A of one q_proj, to scale."""
    weights = lora.get_lora("model.layers.0.self_attn.q_proj")
    r, k, n = weights.rank, weights.input_dim, weights.output_dim
    gap = 130
    axes.add_patch(Rectangle((0, 0), k, n, color=BASE))
    axes.add_patch(Rectangle((k + gap, 0), r, n, color=SQL))
    axes.add_patch(Rectangle((k + gap + r + 14, n - r), k, r, color=SQL))
    axes.text(k / 2, n / 2, f"W\n{n} x {k}\n{n * k:,} numbers", ha="center", va="center", fontsize=10)
    axes.text(k + gap / 2, n / 2, f"+ {weights.scaling:g} x", ha="center", va="center", fontsize=11)
    axes.text(k + gap + r + 14, n / 2, f"B  {n} x {r}", rotation=90, va="center", fontsize=9)
    axes.text(k + gap + r + 14 + k / 2, n - r - 22, f"A  {r} x {k}", ha="center", va="top", fontsize=9)
    total = weights.lora_a.numel() + weights.lora_b.numel()
    axes.text(
        k + gap + r + 60 + k / 2,
        n * 0.45,
        f"{total:,} numbers,\n{total / (n * k):.1%} of W",
        ha="center",
        va="center",
        fontsize=10,
    )
    axes.set(xlim=(-10, 2 * k + gap + r + 30), ylim=(-10, n + 10), aspect="equal")
    axes.set_title("q_proj of one layer and its sql adapter, to scale", fontsize=10, loc="left")
    axes.set_anchor("N")
    axes.axis("off")


def draw_scaling(axes: Axes, lora: LoRAModel) -> None:
    """One row a kind of module, one column a layer; neighbours with the same rank and scaling share a box."""
    of_name = {name.rpartition(".")[2] + name.split(".")[2]: weights for name, weights in lora.loras.items()}
    for row, kind in enumerate(reversed(LINEARS)):
        cells = [(w.rank, w.lora_alpha, w.scaling) for w in (of_name[kind + str(i)] for i in range(LAYERS))]
        start = 0
        for layer in range(1, LAYERS + 1):
            if layer < LAYERS and cells[layer] == cells[start]:
                continue
            rank, alpha, scaling = cells[start]
            box = Rectangle(
                (start, row),
                layer - start,
                1,
                facecolor=SHADES[round(scaling, 3)],
                edgecolor="white",
                linewidth=2,
            )
            axes.add_patch(box)
            axes.text(
                (start + layer) / 2,
                row + 0.5,
                f"{alpha:g}/{rank} = {scaling:.3g}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if scaling == 3 else "#222222",
            )
            start = layer
    axes.set(xlim=(0, LAYERS), ylim=(0, len(LINEARS)), xlabel="layer")
    axes.set_xticks([0.5, 5.5, 10.5, 15.5, 20.5, 25.5, 29.5], [0, 5, 10, 15, 20, 25, 29])
    axes.set_yticks([i + 0.5 for i in range(len(LINEARS))], list(reversed(LINEARS)))
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.set_title("json adapter: alpha / rank = scaling, module by module", fontsize=10, loc="left")


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "minivllm"
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4), gridspec_kw={"width_ratios": [1, 1.15]}, layout="constrained"
    )
    draw_sizes(left, load("sql"))
    draw_scaling(right, load("json"))
    figure.savefig(HERE / "picture.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
