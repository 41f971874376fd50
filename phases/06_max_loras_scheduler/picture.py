"""Draws picture.svg: one call of `Scheduler.schedule`, and what became of every request."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.observe.recorder import WatchedLine, skips
from minivllm.sampling_params import SamplingParams

NAMES = ("base", "json", "sql", "bullets", "dates")
COLOURS = ("#9aa0a6", "#0072B2", "#E69F00", "#009E73", "#CC79A7")
INK, MUTED = "#222222", "#666666"
BUDGET = 64
ROW = 0.62


def add_request(scheduler: Scheduler, adapter_id: int, prompt_tokens: int, kind: str) -> None:
    name = NAMES[adapter_id]
    lora = LoRARequest(name, adapter_id, f"adapters/{name}") if adapter_id else None
    params = SamplingParams(max_tokens=100)
    scheduler.add_request(Request(f"{name}: {kind}", [1] * prompt_tokens, params, lora))


def one_step() -> tuple[Scheduler, list[str], list[str], SchedulerOutput]:
    """Four requests run, five wait; a step is scheduled. Also who ran and who waited before it, in order."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=BUDGET),
        CacheConfig(num_blocks=100, enable_prefix_caching=False),
        LoRAConfig(max_loras=2),
        policy=WatchedLine(),
    )
    for number, adapter_id in enumerate((1, 0, 2, 1)):
        add_request(scheduler, adapter_id, 10, f"answer {number + 1}")
    first = scheduler.schedule()
    scheduler.update_from_output(first, {entry.request.request_id: [1] for entry in first.scheduled})
    for adapter_id, prompt_tokens in ((3, 55), (1, 45), (4, 63), (0, 48), (2, 48)):
        add_request(scheduler, adapter_id, prompt_tokens, f"prompt of {prompt_tokens}")
    running, waiting = ([r.request_id for r in queue] for queue in (scheduler.running, scheduler.waiting))
    output = scheduler.schedule()
    output.skipped, _ = skips(scheduler, output)
    return scheduler, running, waiting, output


def verdict(request_id: str, output: SchedulerOutput) -> str:
    """What the step says of a request, in a few words."""
    for skip in output.skipped:
        if skip.request_id == request_id:
            return f"passed over: {skip.reason}"
    tokens = output.num_scheduled_tokens.get(request_id)
    if tokens is None:
        return f"not asked: {output.halted_by} used up"
    if tokens == 1:
        return "1 token"
    prompt_tokens = int(request_id.split()[-1])
    return (
        f"joins: {tokens} tokens" if tokens == prompt_tokens else f"joins: {tokens} of {prompt_tokens} tokens"
    )


def colour(request_id: str) -> str:
    return COLOURS[NAMES.index(request_id.split(":")[0])]


def draw_queue(axes: Axes, title: str, y: float, request_ids: list[str], output: SchedulerOutput) -> float:
    """One line a request, from `y` down; where the next thing may begin."""
    axes.text(0, y, title, fontsize=10.5, fontweight="bold", color=INK, va="center")
    for request_id in request_ids:
        y -= ROW
        computed = request_id in output.num_scheduled_tokens
        style = {"facecolor": colour(request_id), "alpha": 1 if computed else 0.35, "linewidth": 0}
        axes.add_patch(FancyBboxPatch((0.05, y - 0.2), 3.3, 0.4, boxstyle="round,pad=0.04", **style))
        text = {"color": "white", "fontweight": "bold"} if computed else {"color": INK}
        axes.text(0.2, y, request_id, va="center", fontsize=9.5, **text)
        axes.text(3.6, y, verdict(request_id, output), va="center", fontsize=9.5, color=INK)
    return y - 1.3 * ROW


def draw_slots(axes: Axes, x: float, y: float, scheduler: Scheduler) -> None:
    axes.text(x, y, f"slots: {scheduler.lora.max_loras}", fontsize=10.5, fontweight="bold", va="center")
    for adapter_id in sorted(scheduler.lora.taken):
        y -= 0.9
        axes.add_patch(Rectangle((x, y - 0.35), 2.2, 0.7, facecolor=COLOURS[adapter_id]))
        label = {"ha": "center", "va": "center", "color": "white", "fontweight": "bold"}
        axes.text(x + 1.1, y, NAMES[adapter_id], **label)
    note = "base needs none;\nbullets and dates wait\nfor one of the two"
    axes.text(x, y - 0.65, note, fontsize=9, color=MUTED, va="top", linespacing=1.4)


def draw_budget(axes: Axes, y: float, output: SchedulerOutput) -> None:
    """The step's tokens side by side, in the colours of their adapters."""
    axes.text(0, y, f"the step: {output.total_num_scheduled_tokens} of {BUDGET} tokens", va="center")
    axes.texts[-1].set(fontsize=10.5, fontweight="bold", color=INK)
    width, x = 9.6 / BUDGET, 0.0
    for entry in output.scheduled:
        for _ in range(entry.num_new_tokens):
            box = (x + 0.01, y - 0.75), width - 0.02, 0.45
            axes.add_patch(Rectangle(*box, facecolor=colour(entry.request.request_id)))
            x += width


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "minivllm"
    scheduler, running, waiting, output = one_step()
    figure = Figure(figsize=(8.4, 5.2), facecolor="white")
    axes = figure.add_axes((0.03, 0.01, 0.95, 0.97))
    axes.set(xlim=(0, 9.7), ylim=(-8.0, 0.3))
    axes.axis("off")
    y = draw_queue(axes, "running: first their next token", 0, running, output)
    y = draw_queue(axes, "waiting: then who can join, in the order of arrival", y, waiting, output)
    draw_slots(axes, 7.4, 0, scheduler)
    draw_budget(axes, y, output)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
