"""What options are read by, without PyTorch: nonsense is refused before anything is loaded."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer
import typer.core

PEERS = ("transformers", "peft")
SERVER_NEEDS = ("starlette", "uvicorn", "prometheus_client")


class SeveralValues(typer.core.TyperCommand):
    """A command whose repeatable options take several values at a time, as vLLM's do: `--lora-modules a=x b=y`.

    An argument that looks like a value of such an option is one: `NAME=PATH` or JSON for adapters.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(repeated(args)))


def repeated(args: Sequence[str]) -> Iterator[str]:
    """The same arguments, with the option before each of its values.

    As vLLM's command, too: `--model M` is the argument M, and `--max_loras` is `--max-loras`.
    """
    option = None
    args = [with_hyphens(argument) for argument in args]
    for last, argument in zip(["", *args], args):
        if argument == "--model":
            option = None
            continue
        if last == "--lora-modules":
            option = last
        elif argument.startswith("--model="):
            option, argument = None, argument.removeprefix("--model=")
        elif argument.startswith("-"):
            option = None
        elif option and (argument.startswith("{") or "=" in argument):
            yield option
        yield argument


def with_hyphens(argument: str) -> str:
    """An option's name without underscores; any other argument as it is."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names, each once; empty text is none. BadParameter lists those that there are."""
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    there_are = f"give any of {', '.join(known)}, with commas between"
    for name in names:
        if name not in known:
            what = f"there is no '{name}'" if name else f"'{text}' has an empty name in it"
            raise typer.BadParameter(f"{what}; {there_are}", param_hint=option)
        if names.count(name) > 1:
            raise typer.BadParameter(f"'{name}' is named twice; {there_are}", param_hint=option)
    return names


def parse_peers(option: str, text: str) -> list[str]:
    """What `bench cpu` can measure against, and is installed."""
    names = parse_names(option, text, PEERS)
    for name in names:
        if importlib.util.find_spec(name) is None:
            what = f"{name} is not installed; run `pip install {name}`, or leave it out"
            raise typer.BadParameter(what, param_hint=option)
    return names


def check_server_is_installed() -> None:
    """ValueError that says how to get what only the server needs."""
    if missing := [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]:
        raise ValueError(f"serving needs {', '.join(missing)}; run `pip install 'minivllm[serve]'`")


def with_options_of(root: Any, arguments: Sequence[str], text: str) -> str:
    """A sentence of the engine's, fit for the command that was called.

    The engine says `pass --max-lora-rank 64`, whoever calls it. Where that command has no such option but another one
    has, it becomes `max_lora_rank=64 from Python`.

    root        the command with all others in it
    arguments   of the command line
    """
    called = root
    for word in arguments:
        called = getattr(called, "commands", {}).get(word, called)
    own = options_of(called)
    foreign = {option: name for command in _commands(root) for option, name in options_of(command).items()}
    foreign = {option: name for option, name in foreign.items() if option not in own}
    if not foreign:
        return text
    pattern = "|".join(map(re.escape, sorted(foreign, key=len, reverse=True)))
    value = r"(?: (?P<value>[\d.,]*\d))?"
    return re.sub(rf"(?P<option>{pattern})(?![\w-]){value}", lambda found: _from_python(foreign, found), text)


def options_of(command: Any) -> dict[str, str]:
    """`--max-lora-rank` and the like -> the name from Python, of a command without those in it."""
    return {
        option: parameter.name
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }


def _commands(root: Any) -> list[Any]:
    inner = getattr(root, "commands", {}).values()
    return [root, *(command for one in inner for command in _commands(one))]


def _from_python(names: dict[str, str], found: re.Match[str]) -> str:
    name, value = names[found["option"]], found["value"]
    return f"{name}={value} from Python" if value else f"{name} from Python"
