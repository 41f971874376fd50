"""`python -m benchmarks.engine decode|serve|switch`: the whole engine on random weights. See README.md."""

import importlib
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import (
    BACKENDS,
    DORA,
    DTYPES,
    EVICTION_POLICIES,
    SCHEDULING_POLICIES,
    SHAPE_NAMES,
    decode_case,
    device,
    each_once,
    model,
    number,
    one_of,
    run_as_command,
    whole,
)

NAME = "python -m benchmarks.engine"
# Options that say which part of a benchmark to run now, or where to put it; the others define what is measured.
CUTS = ("command", "cases", "requests", "json", "plot")
# Older results know no such option: by default it is not written.
NEWER = {
    "threads": None,
    "tensor_parallel_size": 1,
    "disable_custom_all_reduce": False,
    "fully_sharded_loras": False,
    "enable_dora": False,
}


def add_engine_options(parser: ArgumentParser) -> None:
    names = ", ".join(SHAPE_NAMES)
    parser.add_argument(
        "--model", type=model, default="llama-8b", help=f"{names}, or a folder; weights are random"
    )
    parser.add_argument("--device", type=device, default="auto")
    parser.add_argument(
        "--dtype", type=one_of(DTYPES), default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--threads", type=whole(), help="CPU threads; as many as are fastest if not given")
    parser.add_argument("--rank", type=whole(), default=16, help="of the adapters and of the slots")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits whatever else is in a batch"
    )
    parser.add_argument("--punica-backend", type=one_of(BACKENDS), default="auto")
    parser.add_argument(
        "--target-modules", type=each_once(str), help="what to wrap; all that can be if not given"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=whole(), default=1, help="processes that share every layer, a GPU each"
    )
    parser.add_argument(
        "--disable-custom-all-reduce", action="store_true", help="NCCL takes all sums over GPUs"
    )
    parser.add_argument(
        "--fully-sharded-loras", action="store_true", help="these have a part of both A and B each"
    )
    parser.add_argument(
        "--enable-dora",
        action="store_true",
        help="slots have room for DoRA's scales; cases as 8-dora need it",
    )
    parser.add_argument("--max-model-len", type=whole(), default=2048)
    parser.add_argument("--max-num-batched-tokens", type=whole(), default=8192)
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    parser.add_argument("--plot", type=Path, help="picture; beside the result file if not given")


def add_decode_options(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=each_once(whole()), default=[1, 32, 128])
    parser.add_argument("--cases", type=each_once(decode_case), default=["base", "none", "1", "8", "32"])
    parser.add_argument("--prompt-tokens", type=whole(), default=128)
    # Of a request's first token nobody says that it was decoded.
    parser.add_argument("--output-tokens", type=whole(2), default=256)
    parser.add_argument(
        "--repeats", type=whole(), default=2, help="passes of each case; medians are reported"
    )


def add_serve_options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", type=each_once(one_of(("base", "lora"))), default=["base", "lora"])
    parser.add_argument("--num-requests", type=whole(), default=400)
    parser.add_argument("--rate", type=number(above=True), default=16.0, help="requests a second")
    parser.add_argument("--adapters", type=whole(), default=32)
    parser.add_argument("--alpha", type=number(), default=1.0, help="of the adapters' Zipf popularity")
    parser.add_argument(
        "--slots", type=whole(), help="as many as there is memory for if not given; 1 on a CPU"
    )
    parser.add_argument("--cpu-loras", type=whole(), help="adapters in memory; all of them if not given")
    parser.add_argument(
        "--lowest-rank",
        type=whole(),
        help="adapters have ranks from here to --rank in turns; --rank if not given",
    )
    parser.add_argument(
        "--earlier-requests",
        type=whole(),
        help="adapters that so many asked for are loaded; all if not given",
    )
    parser.add_argument("--eviction-policy", type=one_of(EVICTION_POLICIES), default="lru")
    parser.add_argument("--scheduling-policy", type=one_of(SCHEDULING_POLICIES), default="fcfs")
    parser.add_argument("--cold", action="store_true", help="adapters are read when first asked for")
    parser.add_argument("--max-num-seqs", type=whole(), default=128)
    parser.add_argument("--prompt-median", type=whole(), default=128)
    parser.add_argument("--prompt-max", type=whole(8), default=1024)
    parser.add_argument("--output-median", type=whole(), default=128)
    parser.add_argument("--output-max", type=whole(2), default=512)
    parser.add_argument("--sigma", type=number(), default=0.8, help="of the log-normal lengths")
    parser.add_argument("--seed", type=whole(0), default=0)


def add_switch_options(parser: ArgumentParser) -> None:
    parser.add_argument("--switches", type=whole(), default=20, help="samples of each kind")
    parser.add_argument("--running", type=whole(), default=16, help="requests that decode meanwhile")
    parser.add_argument("--prompt-tokens", type=whole(), default=128)
    parser.add_argument("--slots", type=whole(2), default=4)
    parser.add_argument("--adapters", type=whole(3), default=8)


def check_together(options: Namespace) -> None:
    """ValueError for options that are possible one by one, and cannot be measured together."""
    if options.command == "switch" and options.slots >= options.adapters:
        raise ValueError(
            f"a switch needs more adapters than slots, got --adapters {options.adapters} and --slots {options.slots}; "
            f"give --adapters {options.slots + 1} or more"
        )
    if options.command == "serve" and options.slots and (options.cpu_loras or options.slots) < options.slots:
        raise ValueError(
            f"--cpu-loras {options.cpu_loras} is less than --slots {options.slots}: adapters in slots are in memory "
            f"too; give {options.slots} or more"
        )
    dora = [case for case in getattr(options, "cases", ()) if case.endswith(DORA)]
    if dora and not options.enable_dora:
        raise ValueError(f"case '{dora[0]}' has DoRA adapters; give --enable-dora, too")
    lengths = {
        "decode": ("prompt_tokens", "output_tokens"),
        "serve": ("prompt_max", "output_max"),
        "switch": (),
    }
    longest = sum(getattr(options, name) for name in lengths[options.command])
    if longest > options.max_model_len:
        raise ValueError(
            f"requests may have {longest} tokens, more than --max-model-len {options.max_model_len}; give {longest} "
            "there, or shorter requests"
        )


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add_options in COMMANDS.items():
        command = commands.add_parser(name)
        add_engine_options(command)
        add_options(command)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON row by row, and draw it. ValueError for options that cannot be."""
    options = parse(arguments)
    check_together(options)
    # PyTorch comes with these: only when there is something to measure.
    benchmark = importlib.import_module(f"benchmarks.{options.command}")
    plots, report = (importlib.import_module(f"benchmarks.{name}") for name in ("plots", "report"))
    path = options.json or report.default_path(f"engine-{options.command}", options.device)
    kept = {key: value for key, value in vars(options).items() if key not in CUTS}
    for name, default in NEWER.items():
        if kept[name] == default:
            del kept[name]
    result = report.Report(path, f"engine-{options.command}", kept, options.device)
    options.model = importlib.import_module("benchmarks.options").model_folder(options.model)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        benchmark.run(options, result, Path(folder))
    draw = getattr(plots, f"draw_{options.command}")
    draw(result.content, options.plot or path.with_suffix(".png"))


def _memory_folder() -> str | None:
    """Where files are in memory, if there is such a place with room: adapters are written and read in no time."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 * 2**30
    return str(shared) if roomy else None


COMMANDS = {"decode": add_decode_options, "serve": add_serve_options, "switch": add_switch_options}


if __name__ == "__main__":
    run_as_command(NAME, main)
