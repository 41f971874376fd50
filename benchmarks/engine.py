"""`python -m benchmarks.engine decode|serve|switch`: the whole engine on random weights. See README.md."""

import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import decode, plots, serve, switch
from benchmarks.options import add_engine_options, model_folder
from benchmarks.report import Report, default_path

# Options that say which part of a benchmark to run now, or where to put it; the others define what is measured.
CUTS = ("command", "cases", "requests", "json", "plot")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def add_decode_options(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=numbers, default=[1, 32, 128])
    parser.add_argument("--cases", type=names, default=["base", "none", "1", "8", "32"])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2, help="passes of each case; medians are reported")


def add_serve_options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", type=names, default=["base", "lora"])
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the adapters' Zipf popularity")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--cpu-loras", type=int, help="adapters in memory; all of them if not given")
    parser.add_argument("--cold", action="store_true", help="adapters are read when first asked for")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--prompt-median", type=int, default=128)
    parser.add_argument("--prompt-max", type=int, default=1024)
    parser.add_argument("--output-median", type=int, default=128)
    parser.add_argument("--output-max", type=int, default=512)
    parser.add_argument("--sigma", type=float, default=0.8, help="of the log-normal lengths")
    parser.add_argument("--seed", type=int, default=0)


def add_switch_options(parser: ArgumentParser) -> None:
    parser.add_argument("--switches", type=int, default=20, help="samples of each kind")
    parser.add_argument("--running", type=int, default=16, help="requests that decode meanwhile")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=8)


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, add_options, _) in COMMANDS.items():
        command = commands.add_parser(name)
        add_engine_options(command)
        add_options(command)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON row by row, and draw it. ValueError for options that cannot be."""
    options = parse(arguments)
    run, _, draw = COMMANDS[options.command]
    path = options.json or default_path(f"engine-{options.command}", options.device)
    kept = {key: value for key, value in vars(options).items() if key not in CUTS}
    report = Report(path, f"engine-{options.command}", kept, options.device)
    options.model = model_folder(options.model)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        run(options, report, Path(folder))
    draw(report.content, options.plot or path.with_suffix(".png"))


def _memory_folder() -> str | None:
    """Where files are in memory, if there is such a place with room: adapters are written and read in no time."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 * 2**30
    return str(shared) if roomy else None


COMMANDS = {
    "decode": (decode.run, add_decode_options, plots.draw_decode),
    "serve": (serve.run, add_serve_options, plots.draw_serve),
    "switch": (switch.run, add_switch_options, plots.draw_switch),
}


if __name__ == "__main__":
    main(sys.argv[1:])
