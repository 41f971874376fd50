"""The `minivllm` command. Stands for vllm/entrypoints/cli (v0.22.1)."""

import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import minivllm
from minivllm.commands.engine_options import takes_engine_options
from minivllm.commands.options import (
    PEERS,
    SeveralValues,
    check_server_is_installed,
    parse_peers,
    with_options_of,
)
from minivllm.commands.quiet import end_at_ctrl_c, quiet_libraries
from minivllm.commands.simulate_cli import simulate
from minivllm.errors import EngineDeadError

quiet_libraries()
logging.basicConfig(format="%(message)s", level=logging.WARNING)
# A thread that waits for another one looks 300,000 times before it sleeps. Where neighbours have that one's core, it is
# this looking that costs; 10,000 times still span what lies between two products. Read when PyTorch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long options off at 80 columns
)
bench_app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
app.command("simulate")(simulate)

MODEL_HELP = "A model's folder or Hugging Face id; the demo model if not given."
Engine = dict[str, Any]  # options of `EngineArgs`
Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Adapters = Annotated[
    list[str] | None, typer.Option("--adapter", help="NAME=PATH of an adapter folder; may be repeated.")
]
Prompts = Annotated[
    list[str] | None, typer.Argument(help="Prompts; `name: prompt` picks an adapter. None: read stdin.")
]
PromptFile = Annotated[
    Path | None, typer.Option(help='Lines of `name: prompt`, or JSONL: {"prompt": ..., "adapter": ...}.')
]
AdapterFolder = Annotated[
    str | None, typer.Option(help="A folder of adapter folders; `name: prompt` finds FOLDER/name.")
]
BaseModelName = Annotated[
    str | None,
    typer.Option(help="What adapters in that folder call the model, if not as its folder is called."),
]
FrequencyPenalty = Annotated[float, typer.Option(help="Taken off as often as the answer has it; in [-2, 2].")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: less of what prompt and answer have.")]


def set_log_level(level: str | None) -> str | None:
    """Have the package's loggers tell from this level on; `BadParameter` for a level that logging does not know."""
    if level is None:
        return None
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"'{level}' is no level; use debug, info, warning or error")
    logging.getLogger("minivllm").setLevel(level.upper())
    return level


LogLevel = Annotated[
    str | None,
    typer.Option(
        callback=set_log_level,
        help="debug, info, warning or error. info tells of loads, reloads and refusals of adapters; debug also of "
        "slots, evictions and requests that are passed over.",
    ),
]


def print_version(asked: bool) -> None:
    if asked:
        print(f"minivllm {minivllm.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Multi-LoRA serving as vLLM does it: one base model, many adapters, one batch."""


@app.command()
@takes_engine_options("punica_backend", "device", "dtype", "quantization", "threads")
def demo(
    max_loras: Annotated[int, typer.Option(help="Slots: adapters in one batch.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 48,
    per_adapter: Annotated[int, typer.Option(help="Prompts for each adapter.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for demo.json, slots.png and trace.html.")] = Path("out"),
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="A tiny random model instead, on Triton's kernels, without a GPU too."),
    ] = False,
    as_json: Json = False,
    log_level: LogLevel = None,
    *,
    engine: Engine,
) -> None:
    """Serve a mixed batch: four trained adapters and the base model, with fewer slots than adapters."""
    with Console().status("starting"):  # PyTorch takes some seconds to import
        from minivllm.commands.common import from_checkout
        from minivllm.commands.tiny_demo import run_tiny_demo

    if tiny:
        raise typer.Exit(0 if run_tiny_demo(min(max_tokens, 12), engine, as_json) else 1)
    demo = from_checkout("examples.demo")
    demo.run_demo(max_loras, max_tokens, per_adapter, engine, out, as_json)


@app.command()
@takes_engine_options(but=("seed", "skip_tokenizer_init"))
def generate(
    prompts: Prompts = None,
    file: PromptFile = None,
    model: Model = None,
    adapter: Adapters = None,
    adapter_folder: AdapterFolder = None,
    base_model_name: BaseModelName = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0 = all.")] = 0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off what the answer has; in [-2, 2].")] = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts through the model's chat template.")] = True,
    as_json: Json = False,
    log_level: LogLevel = None,
    *,
    engine: Engine,
) -> None:
    """Answer prompts, each by the base model or by the adapter it names."""
    given = dict(locals())  # every option by its name
    from minivllm.commands.generate import SAMPLING, read_prompts, run_generate
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(**{name: given[name] for name in SAMPLING})
    sources = adapter or [], adapter_folder, base_model_name
    run_generate(read_prompts(prompts, file), model, *sources, params, engine, chat, as_json)


@app.command(cls=SeveralValues)
@takes_engine_options()
def serve(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help='NAME=PATH of adapters, or JSON: {"name": ..., "path": ...}. `demo`: the demo model\'s four.'
        ),
    ] = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="LoRA is on in any case; vLLM's command lines have it.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Asked of every request; or set MINIVLLM_API_KEY.")
    ] = None,
    adapter_key: Annotated[
        list[str] | None, typer.Option(help="NAME=KEY that opens one adapter alone; may be repeated.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What requests call the base model.")] = None,
    lora_root: Annotated[
        str | None, typer.Option(help="A folder of adapter folders: a model `x` is found in FOLDER/x.")
    ] = None,
    allow_runtime_lora: Annotated[
        bool, typer.Option("--allow-runtime-lora", help="Let requests load, unload and pin adapters.")
    ] = False,
    base_model_name: BaseModelName = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may send requests (CORS), or *.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Without a key: a name that requests may call this server by, besides 127.0.0.1; * is any."
        ),
    ] = None,
    no_access_log: Annotated[
        bool,
        typer.Option("--no-access-log", "--disable-uvicorn-access-log", help="No line for each request."),
    ] = False,
    drain_seconds: Annotated[float, typer.Option(min=0, help="For running requests after a SIGTERM.")] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 4 * 2**20,
    max_concurrency: Annotated[int, typer.Option(min=1, help="HTTP requests at a time.")] = 512,
    max_queued: Annotated[
        int | None, typer.Option(min=0, help="Requests that wait for a place in the batch; 429 beyond.")
    ] = 1024,
    log_level: LogLevel = None,
    *,
    engine: Engine,
) -> None:
    """Serve one model and its adapters, each a model of its own, in OpenAI's form."""
    given = dict(locals())  # every option by its name
    check_server_is_installed()
    from minivllm.commands.serve import run_serve

    run_serve(given, engine)


@app.command()
@takes_engine_options(
    "max_lora_rank",
    "bias_enabled",
    "enable_dora",
    "refuse_pickles",
    "lora_extra_vocab_size",
    "long_lora_scaling_factors",
)
def inspect(
    adapter: Annotated[str, typer.Argument(help="An adapter folder or Hugging Face id.")],
    model: Model = None,
    mixed_with: Annotated[
        list[str] | None,
        typer.Option(help="Another adapter, which it is to be mixed with; may be repeated."),
    ] = None,
    as_json: Json = False,
    *,
    engine: Engine,
) -> None:
    """Say what an adapter is, and whether it fits the model and, if not, why. Exit status 1 if not."""
    from minivllm.commands.inspect import run_inspect

    raise typer.Exit(0 if run_inspect(adapter, model, engine, as_json, mixed_with or ()) else 1)


@app.command("trace-page")
def trace_page(
    trace: Annotated[Path, typer.Argument(help="The demo's demo.json, or what Trace.write_jsonl wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("trace.html"),
) -> None:
    """Write one HTML page that shows an engine's steps: slots, rows, queue, memory."""
    from minivllm.commands.trace_page import run_trace_page

    run_trace_page(trace, out)


@bench_app.command("cpu")
@takes_engine_options("threads")
def bench_cpu(
    against: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PEERS)}; empty for none.")] = "",
    # A step's time is that of the steps after the first; the engines have room for 512 tokens.
    max_tokens: Annotated[int, typer.Option(min=2, max=480, help="Tokens an answer.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Times everything is measured; medians are shown.")
    ] = 3,
    as_json: Json = False,
    *,
    engine: Engine,
) -> None:
    """Decode on this CPU: base, mixed adapters, one request; beside transformers and PEFT if asked. From a checkout."""
    peers = parse_peers("--against", against)  # before PyTorch is imported
    from minivllm.commands.common import from_checkout

    from_checkout("benchmarks.cpu").run_bench(peers, max_tokens, rounds, engine.get("threads"), as_json)


def main() -> None:
    """The entry point: errors of the user's doing are one sentence and exit status 2."""
    end_at_ctrl_c()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # an answer is not lost because a terminal lacks one of its characters
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:
        problem = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    except (ValueError, ModuleNotFoundError, EngineDeadError) as error:
        problem = str(error)
    problem = with_options_of(typer.main.get_command(app), sys.argv[1:], problem)
    Console(stderr=True).print(f"[red]error:[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
