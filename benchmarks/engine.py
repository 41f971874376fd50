"""`python -m benchmarks.engine decode|serve|switch`: the whole engine on random weights. See README.md."""

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import decode, plots
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
    """Where files are in memory, on Linux: adapters are written and read in no time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


COMMANDS = {
    "decode": (decode.run, add_decode_options, plots.draw_decode),
}


if __name__ == "__main__":
    main(sys.argv[1:])
