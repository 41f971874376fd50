"""What `lab league` says: a table, and with it a page and a picture for all who play."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labs.kit.commands.shared import choose, console
from labs.kit.progress import has_stub, is_untouched
from labs.kit.regions import LabError

BOUND = "no policy beats"
MOST_SHOWN = 2.0  # of the engine's own; further out a picture shows an arrow


class Row(NamedTuple):
    """score: the mean share over all traffics; apart: over those that are kept apart, None if there are none"""

    name: str
    score: float
    apart: float | None
    shares: dict[str, float]
    figures: dict[str, dict[str, float]]


class Board(NamedTuple):
    """What everybody may see: of traffics that are kept apart nothing but a number for each entrant.

    names   of the open traffics
    rows    the least score first
    out     entrant -> why it is out of the league
    least   open traffic -> what no policy beats
    """

    names: list[str]
    rows: list[Row]
    out: dict[str, str]
    least: dict[str, dict[str, float]]


def league(
    file: Annotated[
        Path | None, typer.Argument(help="Your policies; none: the exercises of phase 10 that you solved.")
    ] = None,
    submissions: Annotated[Path | None, typer.Option(help="Host: a folder with a file for each.")] = None,
    secret: Annotated[
        Path | None, typer.Option(help="Host: a file with a line that two more traffics are drawn from.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where league.md and league.png go.")] = Path("out/league"),
    workers: Annotated[int, typer.Option(min=1, help="Entrants that play at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers; a host's eyes only.")] = False,
) -> None:
    """Your policies on the simulator's traffics, beside ours and what no policy can beat."""
    from labs.kit.league import OPEN_TRAFFICS, apart, bounds
    from labs.kit.league_compete import Result, compete
    from labs.kit.league_entrants import OURS, read_submissions

    if (submissions is None) != (secret is None):
        raise LabError("a host gives both --submissions and --secret; who plays alone gives neither")
    traffics = list(OPEN_TRAFFICS)
    if submissions is not None:
        entrants = read_submissions(submissions)
        traffics += apart(secret.read_text(encoding="utf-8").strip())
    else:
        entrants = yours(file)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    plays = f"{len(traffics)} traffics, {len(OURS)} of ours and {len(entrants)} more"
    aside.print(f"{plays}; each takes about {2 * len(traffics)} s of computing")

    def say(result: Result) -> None:
        aside.print(f"  {escape(result.name)}" + (f": [red]{escape(result.said)}[/]" if result.why else ""))

    least = {traffic.name: bounds(traffic) for traffic in traffics}
    ours = compete(OURS, traffics, least, workers=workers, on_end=say)
    theirs = compete(entrants, traffics, least, submissions is not None, workers, say)
    found = board(ours + theirs, traffics, least)
    out.mkdir(parents=True, exist_ok=True)
    (out / "league.md").write_text(page(found), encoding="utf-8")
    (out / "league.png").write_bytes(picture(found))
    if as_json:
        print(json.dumps(everything(ours + theirs, traffics, least, found), indent=1))
    else:
        show(found)
        console.print(f"[dim]{escape(str(out))}/league.md and league.png have more[/]")


def yours(file: Path | None) -> list[Any]:
    """A learner's file, or an entrant for each exercise that is solved. LabError for neither."""
    from labs.kit.league_entrants import EXERCISES, of_exercise, of_file

    if file is not None:
        if not file.is_file():
            raise LabError(f"there is no {file}; docs/league.md shows one")
        return [of_file(file)]
    solved = [e.number for e in choose("10") if not is_untouched(e) and not has_stub(e)]
    return [of_exercise(number) for number in solved if number in EXERCISES]


def board(results: Sequence[Any], traffics: Sequence[Any], least: dict[str, dict[str, float]]) -> Board:
    """results: of `compete`; the first is the engine's own"""
    from labs.kit.league import share

    names = [traffic.name for traffic in traffics if not traffic.is_apart]
    rows = []
    for result in results:
        if not result.why:
            own = results[0].figures
            shares = {name: share(each, own[name], least[name]) for name, each in result.figures.items()}
            hidden = [shares[traffic.name] for traffic in traffics if traffic.is_apart]
            apart = sum(hidden) / len(hidden) if hidden else None
            score = sum(shares.values()) / len(shares)
            shown = {name: shares[name] for name in names}
            rows.append(Row(result.name, score, apart, shown, {n: result.figures[n] for n in names}))
    rows.sort(key=lambda row: row.score)
    out = {result.name: result.said for result in results if result.why}
    return Board(names, rows, out, {name: least[name] for name in names})


def everything(
    results: Sequence[Any], traffics: Sequence[Any], least: dict[str, dict[str, float]], found: Board
) -> dict[str, Any]:
    """For the host: also the traffics that are kept apart, and what happened on them."""
    score = {row.name: row.score for row in found.rows}
    return {
        "traffics": [{"name": t.name, "apart": t.is_apart, **t.given} for t in traffics],
        "bounds": least,
        "entrants": [
            {"name": r.name, "score": score.get(r.name), "why": r.why, "figures": r.figures} for r in results
        ],
    }


# Tables. What is shown: its field, and what it says.

TABLES = {
    "ttft_ms": "Mean time to first token, ms",
    "ttft_p99_ms": "99th percentile of the time to first token, ms",
    "reads": "Adapters read from disk",
    "hits": "Requests that find their adapter in one memory, by the eviction policy alone (of 500)",
}


def cells(found: Board, field: str) -> list[list[str]]:
    """A header, a row for each entrant, and the bound."""
    has_apart = any(row.apart is not None for row in found.rows)
    head = ["", "score", *(["apart"] if has_apart else []), *found.names]
    lines = [head]
    for row in found.rows:
        scores = [f"{row.score:.2f}", *([f"{row.apart:.2f}"] if has_apart else [])]
        lines.append([row.name, *scores, *(f"{row.figures[name][field]:,.0f}" for name in found.names)])
    if all(field in found.least[name] for name in found.names):
        bound = [f"{found.least[name][field]:,.0f}" for name in found.names]
        lines.append([BOUND, "0", *(["0"] if has_apart else []), *bound])
    return lines


def show(found: Board) -> None:
    head, *lines = cells(found, "ttft_ms")
    table = Table(*head, title=TABLES["ttft_ms"], box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        is_ours = line[0].startswith("ours: ") or line[0] == BOUND
        table.add_row(*map(escape, line), style="" if is_ours else "bold")
    console.print(table)
    console.print("[dim]score: the mean over traffics; 1 is the engine's own policies, 0 the bound[/]")
    for name, why in found.out.items():
        console.print(f"[red]✗ {escape(name)}[/]: {escape(why)}")


def page(found: Board) -> str:
    """All tables, in Markdown."""
    parts = ["# League", "![every entrant's share on every traffic](league.png)"]
    said = "1 is the engine's own policies, and 0 is what no policy can beat. The score is the mean over traffics"
    hidden = ", those that are kept apart among them" if any(r.apart is not None for r in found.rows) else ""
    parts.append(f"{said}{hidden}. Less is better.")
    for field, title in TABLES.items():
        head, *lines = [[_plain(cell) for cell in line] for line in cells(found, field)]
        rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
        parts += [f"## {title}", "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    if found.out:
        parts.append("## Out of the league")
        parts.append("\n".join(f"- {_plain(name)}: {_plain(why)}" for name, why in found.out.items()))
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """So that no name or message is taken for Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#!" else " " if c in "\r\n" else c for c in text)


def picture(found: Board) -> bytes:
    """A PNG: a bar for each entrant's score, and a dot for each traffic. The same bytes for the same board."""
    from matplotlib.figure import Figure

    from minivllm.observe.palette import ADAPTER_COLOURS, BASE_COLOUR

    figure = Figure(figsize=(10, 1.8 + 0.4 * len(found.rows)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    places = range(len(found.rows))
    axes.barh(places, [min(row.score, MOST_SHOWN) for row in found.rows], color="#D9D9D9", label="score")
    for name, colour in zip(found.names, ADAPTER_COLOURS):
        shown = [row.shares[name] for row in found.rows]
        _dots(axes, shown, name, colour, "o")
    if any(row.apart is not None for row in found.rows):
        _dots(axes, [row.apart for row in found.rows], "kept apart, mean", "black", "D")
    axes.axvline(1.0, color=BASE_COLOUR, linestyle="--", linewidth=1)
    axes.axvline(0.0, color="black", linewidth=1)
    axes.set_yticks(places, [row.name[:40].replace("$", r"\$") for row in found.rows])
    axes.set_ylim(len(found.rows) - 0.4, -0.6)
    axes.set_xlim(0, MOST_SHOWN * 1.04)
    axes.set_xlabel("mean time to first token: 0 = what no policy beats, 1 = the engine's own policies")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.4, -0.35 / (1.8 + 0.4 * len(found.rows)) - 0.12), ncols=4
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110, metadata={"Software": None})
    return drawn.getvalue()


def _dots(axes: Any, shares: list[float], name: str, colour: str, marker: str) -> None:
    """A dot for each entrant; an arrow at the edge stands for what lies further out."""
    inside = [(share, place) for place, share in enumerate(shares) if share <= MOST_SHOWN]
    beyond = [place for place, share in enumerate(shares) if share > MOST_SHOWN]
    axes.scatter(*zip(*inside), color=colour, marker=marker, s=28, zorder=3, label=name)
    axes.scatter([MOST_SHOWN] * len(beyond), beyond, color=colour, marker=">", s=36, zorder=3)
