"""Draws picture.svg: one mixed step from the scheduler's decision to the tokens it samples."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.lora.mapping import slots_of
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch

NAMES = ("base", "json", "sql", "bullets", "dates")
COLOURS = ("#9aa0a6", "#0072B2", "#E69F00", "#009E73", "#CC79A7")
INK, MUTED = "#222222", "#666666"
SLOTS = [2, 4, 1]  # the adapter in each slot, after set_active_adapters
LEFT, CELL = 3.2, 0.42


def one_step() -> SchedulerOutput:
    """Answers of json, base and dates, a prompt of sql, and a piece of a dates prompt, in 24 tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
        CacheConfig(num_blocks=100, enable_prefix_caching=False),
        LoRAConfig(max_loras=3),
    )

    def add(adapter_id: int, prompt_tokens: int) -> None:
        name = NAMES[adapter_id]
        lora = LoRARequest(name, adapter_id, f"adapters/{name}") if adapter_id else None
        params = SamplingParams(max_tokens=9)
        scheduler.add_request(Request(f"{name}{prompt_tokens}", [1] * prompt_tokens, params, lora))

    for adapter_id in (4, 1, 0):
        add(adapter_id, 3)
    first = scheduler.schedule()
    scheduler.update_from_output(first, {entry.request.request_id: [1] for entry in first.scheduled})
    add(2, 9)
    add(4, 20)
    return scheduler.schedule()


def kind(request: Request, tokens: int) -> str:
    if request.num_output_tokens:
        return "answer"
    return "prompt" if tokens == request.num_tokens else f"first {tokens} of a prompt of {request.num_tokens}"


def x_of(token: int) -> float:
    return LEFT + token * CELL


def lane(axes: Axes, y: float, title: str, note: str) -> None:
    axes.text(0, y + 0.1, title, fontsize=9.5, fontweight="bold", color=INK, va="bottom")
    axes.text(0, y + 0.02, note, fontsize=8.5, color=MUTED, va="top", linespacing=1.3)


def cell(axes: Axes, token: int, y: float, colour: str, text: object = "", filled: bool = True) -> None:
    style = {"facecolor": colour if filled else "white", "edgecolor": colour, "linewidth": 1.2}
    axes.add_patch(Rectangle((x_of(token) + 0.03, y - 0.2), CELL - 0.06, 0.4, **style))
    ink = "white" if filled else INK
    axes.text(x_of(token + 0.5), y, str(text), ha="center", va="center", fontsize=8.5, color=ink)


def draw_rows(axes: Axes, y: float, batch: InputBatch) -> None:
    """The requests of the batch over their tokens."""
    token = 0
    for request, tokens in zip(batch.requests, batch.num_scheduled_tokens.tolist()):
        middle = x_of(token + tokens / 2)
        label, style = (
            f"{NAMES[request.adapter_id]}: {kind(request, tokens)}",
            {"fontsize": 8.5, "color": INK},
        )
        if tokens > 1:
            axes.text(middle, y + 0.34, label, ha="center", va="bottom", **style)
        else:
            axes.text(middle - 0.08, y + 0.34, label, ha="left", va="bottom", rotation=38, **style)
        for offset in range(tokens):
            cell(axes, token + offset, y, COLOURS[request.adapter_id])
        token += tokens


def draw_slot_table(axes: Axes, y: float) -> None:
    for slot, adapter_id in enumerate(SLOTS):
        x = LEFT + 0.03 + slot * 2.6
        axes.add_patch(Rectangle((x, y - 0.24), 2.3, 0.48, facecolor=COLOURS[adapter_id]))
        label = f"slot {slot}: {NAMES[adapter_id]}, id {adapter_id}"
        axes.text(x + 1.15, y, label, ha="center", va="center", fontsize=9, color="white", fontweight="bold")


def draw_samples(axes: Axes, y: float, batch: InputBatch) -> None:
    """An arrow down from the last token of each row that samples."""
    last = -1
    rows = zip(batch.requests, batch.num_scheduled_tokens.tolist(), batch.num_sampled_tokens.tolist())
    for request, tokens, samples in rows:
        last += tokens
        if samples:
            arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x_of(last + 0.5), y + 0.22), (x_of(last + 0.5), y + 0.72), arrowprops=arrow)
            cell(axes, last, y, COLOURS[request.adapter_id], filled=False)


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "minivllm"
    batch = InputBatch.from_scheduler_output(one_step())
    _, ids, _ = batch.make_lora_inputs(batch.num_scheduled_tokens, batch.num_sampled_tokens)
    slots = slots_of(ids, SLOTS)
    figure = Figure(figsize=(9.6, 4.8), facecolor="white")
    axes = figure.add_axes((0.015, 0.01, 0.975, 0.98))
    axes.set(xlim=(0, x_of(len(ids)) + 0.1), ylim=(-5.05, 1.2))
    axes.axis("off")
    lane(
        axes, 0, "the batch", f"{len(batch.requests)} requests, {len(ids)} tokens,\nin the order of adapters"
    )
    draw_rows(axes, 0, batch)
    lane(axes, -1, "ids", "token_lora_mapping: 0 is base")
    lane(axes, -2, "adapters into slots", "set_active_adapters, first half")
    draw_slot_table(axes, -2)
    lane(axes, -3, "slots", "second half: -1 is no slot")
    for token, (adapter_id, slot) in enumerate(zip(ids, slots)):
        cell(axes, token, -1, COLOURS[adapter_id], adapter_id)
        cell(axes, token, -3, COLOURS[adapter_id], slot)
    lane(axes, -3.85, "one forward pass", "")
    width = x_of(len(ids)) - LEFT - 0.1
    box = {"boxstyle": "round,pad=0.03", "facecolor": "#eeeeee", "edgecolor": MUTED}
    axes.add_patch(FancyBboxPatch((LEFT + 0.05, -3.98), width, 0.36, **box))
    text = "all tokens through every layer; each row's own A and B beside the shared weights"
    axes.text(LEFT + width / 2, -3.8, text, ha="center", va="center", fontsize=9, color=INK)
    sampled = int(batch.num_sampled_tokens.sum())
    lane(axes, -4.75, "logits and tokens", f"{sampled} rows sample; the piece does not")
    draw_samples(axes, -4.75, batch)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
