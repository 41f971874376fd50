"""Commands, options and targets of make that README, docs, chapters and notebooks name exist."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from click import Command
from markdown_it import MarkdownIt

from labs.kit.cli import app as lab
from labs.kit.regions import ROOT
from minivllm.cli import app as minivllm

GROUPS = {"minivllm": typer.main.get_command(minivllm), "lab": typer.main.get_command(lab)}
PAGES = sorted(
    path
    for pattern in (
        *("README.md", "docs/*.md", "docs/*.ipynb", "benchmarks/*.md", "deploy/*.md", "adapters/*.md"),
        *("labs/*.md", "phases/*/*.md", "phases/*/*.ipynb", "solutions/*/*.md"),
    )
    for path in ROOT.glob(pattern)
)
# Options that stand alone and are another program's.
OF_OTHERS = {
    "--index-url": "pip",
    "--ip": "Jupyter",
    "--build-arg": "docker",
    **dict.fromkeys(
        [
            *("--enable-lora", "--allowed-origins", "--enable-auto-tool-choice", "--reasoning-parser"),
            *("--root-path", "--ssl-keyfile", "--task", "--generation-config", "--tokenizer", "--revision"),
            *("--trust-remote-code", "--pipeline-parallel-size", "--swap-space"),
        ],
        "vLLM",
    ),
}
ENDS_A_COMMAND = re.compile(r" [|#] |[;&`)\"]| \.\.\.")


@cache
def code(page: Path) -> list[str]:
    """Lines of blocks of code, and what stands in backticks."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("fence", "code_block"):
            found += re.sub(r"\\\n\s*", " ", token.content).split("\n")
        found += [child.content for child in token.children or () if child.type == "code_inline"]
    return found


def commands(line: str) -> Iterator[list[str]]:
    """Each command of this project that a line has: its words, from `minivllm` or `lab` on."""
    if re.search(r"\bfrom minivllm import", line):
        return
    starts = [m.start(1) for m in re.finditer(r"(?:^|[\s/])((?:minivllm|lab) [a-z])", line)]
    for start, end in zip(starts, [*starts[1:], len(line)]):
        yield ENDS_A_COMMAND.split(line[start:end])[0].split()


def wrong_in(words: list[str]) -> list[str]:
    """Subcommands and options that there are not."""
    command, path = GROUPS[words[0]], words[:1]
    words = words[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        path.append(words.pop(0))
    if len(path) == 1:
        return [f"{path[0]} {words[0]}"]
    known = options(command)
    given = words[: words.index("--")] if "--" in words else words
    named = [word.strip("[],.").partition("=")[0] for word in given]
    return [f"{' '.join(path)} {word}" for word in named if re.match(r"--?[a-z]", word) and word not in known]


def options(command: Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}


def all_options() -> set[str]:
    """Of every command, and of what is run by `python -m`."""
    found, groups = set(), list(GROUPS.values())
    for command in groups:
        found |= options(command)
        groups += getattr(command, "commands", {}).values()
    sources = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("deploy/**/*.py"), *ROOT.glob("tests/**/*.py")]
    for source in sources:
        text = source.read_text(encoding="utf-8")
        found |= set(re.findall(r'"(--[a-z][a-z-]+)"', text))
        found |= {"--" + name.replace("_", "-") for name in re.findall(r"^    (\w+): Annotated", text, re.M)}
    return found


def test_commands_that_are_named_exist_and_take_their_options():
    named = [(page, words) for page in PAGES for line in code(page) for words in commands(line)]

    wrong = [f"{page.relative_to(ROOT)}: {each}" for page, words in named for each in wrong_in(words)]

    assert len(named) > 200
    assert wrong == []


def test_options_that_stand_alone_exist():
    alone = re.compile(r"--[a-z][a-z-]*")
    named = [(page, found[0]) for page in PAGES for line in code(page) if (found := alone.match(line))]

    known = all_options() | OF_OTHERS.keys()
    wrong = {f"{page.relative_to(ROOT)}: {option}" for page, option in named if option not in known}

    assert len(named) > 50
    assert wrong == set()


def test_modules_that_are_run_and_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong, found = [], 0
    for page in PAGES:
        for line in code(page):
            modules = re.findall(r"-m ((?:benchmarks|deploy|labs|minivllm|tests)[\w.]*)", line)
            made = re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", line)
            found += len(modules) + len(made)
            paths = {module: ROOT / module.replace(".", "/") for module in modules}
            wrong += [
                m for m, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").is_file())
            ]
            wrong += [f"{page.name}: make {target}" for target in made if target not in targets]

    assert found > 40
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("$ lab run -- minivllm serve --port 80 --prot 8", ["minivllm serve --prot"]),
        ("lab chekc 1.1", ["lab chekc"]),
        ("minivllm bench cpu --threads 2 --rate 3 | less --help", ["minivllm bench cpu --rate"]),
        (".venv/bin/minivllm generate 'a' --json && lab hint 1.1", []),
        ("from minivllm import LLM", []),
        ("Next: lab 1.2, module", []),
    ],
)
def test_what_does_not_exist_is_seen(line, wrong):
    assert [each for words in commands(line) for each in wrong_in(words)] == wrong
