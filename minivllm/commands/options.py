"""What options are read by, without PyTorch: nonsense is refused before anything is loaded."""

import importlib.util
from collections.abc import Sequence

import typer

PEERS = ("transformers", "peft")


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
