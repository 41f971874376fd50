"""`minivllm demo`: the main job, on a real model. Four adapters and the base model in one mixed batch."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.serve_progress import ServeProgress, say_how_long
from minivllm.assembly import LLMEngine
from minivllm.commands.common import checkout_folder, console, from_checkout, print_json
from minivllm.engine.outputs import RequestOutput
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.models.demo_model import MODEL_NAME, demo_model_path
from minivllm.observe.page import build_page, run_of
from minivllm.observe.recorder import room
from minivllm.observe.trace_plot import draw_trace
from minivllm.sampling_params import SamplingParams

ADAPTERS = ("json", "sql", "bullets", "dates")
BASE_PROMPTS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
)
# A new request every so many steps, so that the queue, the slots and the batch have something to do.
STEPS_BETWEEN_ARRIVALS = 2


@dataclass(frozen=True)
class DemoRequest:
    """One prompt for one adapter; None is the base model."""

    request_id: str
    text: str
    adapter: str | None
    prompt: str


def run_demo(
    max_loras: int, max_tokens: int, per_adapter: int, options: dict[str, Any], out: Path, as_json: bool
) -> None:
    """Serve everything, print every prompt with both answers, and write demo.json, slots.png and trace.html.

    options: further `EngineArgs`
    """
    # First: better to fail now than after the work.
    refuse_kernels_without_gpu(options)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    out.mkdir(parents=True, exist_ok=True)
    requests = demo_requests(per_adapter)
    args = EngineArgs(
        model=str(demo_model_path()),
        enable_lora=True,
        max_loras=max_loras,
        max_lora_rank=32,
        max_cpu_loras=max(3, max_loras),
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        max_lora_wait_steps=16,
        **options,
    )
    screen = Console(quiet=True) if as_json else console
    with screen.status(f"reading {MODEL_NAME}, and one step to warm up"):
        engine = LLMEngine.from_engine_args(args)
    say_how_long(screen, engine, expected_steps(len(requests), max_tokens))
    started = time.perf_counter()
    outputs = serve(engine, requests, params, screen)
    seconds = time.perf_counter() - started
    with screen.status("drawing the slots"):
        report = make_report(engine, requests, outputs, seconds)
        write_json(report, out / "demo.json")
        draw_trace(engine.trace, out / "slots.png")
        write_page(report, out / "trace.html")
    if as_json:
        print_json(report)
    else:
        show(report, out)


def refuse_kernels_without_gpu(options: dict[str, Any]) -> None:
    """ValueError for kernels where there is no GPU: the interpreter would take hours."""
    kernels, device = options.get("punica_backend"), options.get("device", "auto")
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if kernels in ("triton", "paged") and not on_gpu:
        raise ValueError(
            f"--punica {kernels} needs a GPU for the demo model; without one, try `minivllm demo --tiny`: a tiny "
            "model, in Triton's interpreter"
        )


def demo_requests(per_adapter: int) -> list[DemoRequest]:
    """Held-out inputs of every adapter's task, each for the adapter and for the base model, in turns."""
    if per_adapter < 0:
        raise ValueError(f"per_adapter must be at least 0, got {per_adapter}")
    tasks = from_checkout("adapters.recipe.tasks")
    requests = []
    for number in range(per_adapter):
        for task in ADAPTERS:
            text = tasks.examples(task, per_adapter)[number].text
            prompt = tasks.prompt(task, text)
            requests.append(DemoRequest(f"{task}-{number}", text, task, prompt))
            requests.append(DemoRequest(f"{task}-{number}-base", text, None, prompt))
    requests += [
        DemoRequest(f"base-{number}", text, None, tasks.prompt(ADAPTERS[0], text))
        for number, text in enumerate(BASE_PROMPTS)
    ]
    return requests


def expected_steps(requests: int, max_tokens: int) -> int:
    """About how many steps it takes: until the last request comes, and its answer."""
    return STEPS_BETWEEN_ARRIVALS * (requests - 1) + max_tokens


def serve(
    engine: LLMEngine, requests: list[DemoRequest], params: SamplingParams, screen: Console
) -> dict[str, RequestOutput]:
    """Step the engine while requests arrive; the last output of each."""
    folder = checkout_folder() / "adapters"
    loras = {name: LoRARequest(name, i, str(folder / name)) for i, name in enumerate(ADAPTERS, 1)}
    arriving, finished, step = deque(requests), {}, 0
    steps = expected_steps(len(requests), params.max_tokens)
    with ServeProgress(engine, len(requests), steps, screen) as progress:
        while arriving or engine.has_unfinished_requests():
            if arriving and step % STEPS_BETWEEN_ARRIVALS == 0:
                request = arriving.popleft()
                lora = loras[request.adapter] if request.adapter else None
                engine.add_request(request.request_id, request.prompt, params, lora_request=lora)
            outputs = engine.step()
            ended = {output.request_id: output for output in outputs if output.finished}
            finished |= ended
            progress.advance(len(ended), sum(len(output.outputs[0].delta_token_ids) for output in outputs))
            step += 1
    return finished


def make_report(
    engine: LLMEngine, requests: list[DemoRequest], outputs: dict[str, RequestOutput], seconds: float
) -> dict[str, Any]:
    """Everything the demo has to tell, as plain values."""
    metrics, trace = engine.get_metrics(), engine.trace.summary()
    answers = {request_id: output.outputs[0].text.strip() for request_id, output in outputs.items()}
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs.values())
    return {
        "answers": [
            {
                "request": request.request_id,
                "adapter": request.adapter,
                "prompt": request.text,
                "base": answers.get(f"{request.request_id}-base", answers[request.request_id]),
                "answer": answers[request.request_id],
            }
            for request in requests
            if not request.request_id.endswith("-base")
        ],
        "requests": len(requests),
        "seconds": seconds,
        "threads": engine.runner.cpu_threads.over_all(),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "max_loras": engine.config.lora_config.max_loras,
        "trace": trace,
        "metrics": metrics,
        "room": room(engine),
        "steps": [asdict(record) for record in engine.trace.records],
    }


def write_json(report: dict[str, Any], path: Path) -> None:
    import json

    path.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def write_page(report: dict[str, Any], path: Path) -> None:
    run = run_of("demo", report["steps"], report["room"])
    path.write_text(build_page("minivllm demo, step by step", [run]), encoding="utf-8")


def show(report: dict[str, Any], out: Path) -> None:
    table = Table("adapter", show_lines=True)
    for column in ("prompt", "base model says", "with the adapter"):
        table.add_column(column, overflow="fold")
    for answer in report["answers"]:
        prompt, base, text = (escape(answer[key]) for key in ("prompt", "base", "answer"))
        if answer["adapter"]:
            table.add_row(answer["adapter"], prompt, base, text)
        else:
            table.add_row("(base)", prompt, text, "")
    console.print(table, highlight=False)
    trace, lora = report["trace"], report["metrics"]["lora"]
    console.print(
        f"[bold]{report['requests']} requests[/] for {trace['adapters']} adapters and the base model "
        f"on {report['max_loras']} slots: {trace['steps']} steps, {trace['mixed_steps']} of them mixed, "
        f"{trace['loads']} loads, {trace['evictions']} evictions, {trace['skips']} times passed over for want "
        f"of a slot, {trace['preemptions']} preemptions, slot hit rate {lora['hit_rate']:.0%}.",
        highlight=False,
    )
    console.print(
        f"[bold]{report['tokens']} tokens[/] in {report['seconds']:.1f} s: "
        f"{report['tokens_per_second']:.0f} tokens/s on {report['threads']}. "
        f"See demo.json, slots.png and trace.html in {escape(str(out))}.",
        highlight=False,
    )
