"""`lab grade`, for instructors."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from labs.kit.commands import hunts, opened
from labs.kit.commands.shared import SIGNS, Which, choose, console
from labs.kit.hunt import is_hunt
from labs.kit.path import TRACKS


def grade_command(
    which: Which = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit's XML here too.")] = None,
    submissions: Annotated[
        Path | None, typer.Option(help="A folder with a student's labs/ in each of its folders.")
    ] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Of submissions: write CSV here too.")] = None,
) -> None:
    """Points for every exercise."""
    from labs.kit.grade import grade, report, write_junit

    if submissions is not None:
        reports = grade_all(submissions, which, table)
    elif is_hunt(which):
        reports = {"minivllm labs": hunts.report(which)}
    else:
        points = report(list(grade(choose(which))))
        reports = {"minivllm labs": {**points, "open": opened.grades(which)}}
    if junit:
        write_junit(reports, junit)
    if as_json:
        print(json.dumps(reports if submissions is not None else reports["minivllm labs"], indent=2))
        return
    for student, points in reports.items():
        say_points(points) if submissions is None else say_sums(student, points)


def grade_all(folder: Path, which: str | None, table: Path | None) -> dict[str, dict]:
    """Student -> points; what comes in between is said on the other stream, as each is graded."""
    from labs.kit.submissions import grade_submissions, read_submissions, write_csv

    chosen, found = choose(which), read_submissions(folder)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    aside.print(f"{len(found)} submissions, {len(chosen)} exercises each; our own code is graded first")
    reports = grade_submissions(
        found,
        chosen,
        on_grade=lambda name, g: aside.print(f"{SIGNS[g.state]} {escape(name)} {g.exercise.number}"),
    )
    if table:
        write_csv(reports, table)
    return reports


def say_points(points: dict) -> None:
    for entry in points["exercises"]:
        sign = SIGNS[entry["state"]]
        console.print(f"{sign} {entry['exercise']} {escape(entry['title'])}  {entry['points']}/{entry['of']}")
    for track, part in points.get("tracks", {}).items():
        console.print(f"{part['points']} of {part['of']} points {TRACKS[track]}")
    console.print(f"{points['points']} of {points['of']} points")
    for entry in points.get("open", []):
        count = "" if entry["count"] is None else f"  {entry['count']:.4g} of {entry['budget']:g}"
        console.print(f"{SIGNS[entry['state']]} {entry['exercise']} {escape(entry['title'])}{count}")


def say_sums(student: str, points: dict) -> None:
    parts = [f"{part['points']} of {part['of']} {TRACKS[track]}" for track, part in points["tracks"].items()]
    console.print(f"{escape(student)}: {', '.join(parts)}")
    for entry in points["exercises"]:
        if entry["message"]:
            line = entry["message"].splitlines()[0]
            console.print(f"  {SIGNS[entry['state']]} {entry['exercise']}: {escape(line)}")
