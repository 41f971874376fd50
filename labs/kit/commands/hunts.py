"""What `lab hunt` says, and what the other commands say of hunts."""

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from labs.kit.commands.run import environment
from labs.kit.commands.shared import SIGNS, choose, console, only_hunt
from labs.kit.hunt import PHASE, Hunt, choose_hunts, read_hunts
from labs.kit.progress import FOLDER, Progress, keep, shown
from labs.kit.regions import LabError, sort_key


def say_count() -> None:
    """How many are solved, in a line."""
    progress, hunts = Progress(), read_hunts().values()
    solved = sum(hunt.state(progress) == "passed" for hunt in hunts)
    console.print(f"[bold]{PHASE}[/]  {solved} of {len(hunts)} hunts solved; `lab hunt` lists them")


def list_hunts() -> None:
    """All of them, with what became of each."""
    progress = Progress()
    console.print(f"[bold]{PHASE}[/]")
    for hunt in read_hunts().values():
        stars = "*" * hunt.difficulty
        console.print(
            f"  {SIGNS[hunt.state(progress)]} {hunt.number} {escape(hunt.title)}  [dim]{stars}, about "
            f"{hunt.minutes} minutes[/]"
        )
    console.print("[dim]`lab hunt 7` tells what users saw of the seventh[/]")


def tell(hunt: Hunt) -> None:
    """The symptom, and what to do about it."""
    console.print(
        f"[bold]Hunt {hunt.number}: {escape(hunt.title)}[/]  [dim]{'*' * hunt.difficulty}, about {hunt.minutes} "
        "minutes[/]\n"
    )
    console.print(hunt.symptom.strip("\n"), markup=False)
    console.print(f"\n1. Write a test that fails on this engine: {shown(hunt.test_file)}")
    console.print(f"     lab hunt {hunt.id} -- pytest {shown(hunt.test_file)}   runs it on the broken engine")
    console.print(f"     pytest {shown(hunt.test_file)}   runs it on the sound one")
    console.print(
        "     What an engine has done is in engine.debug_info(): in the test, world.show(engine) prints what requests "
        "and adapters change of it. Read that before you read code."
    )
    files = [shown(hunt.fix_file(module)) for module in hunt.modules if hunt.fix_file(module).exists()]
    then = "2. Mend the broken code" + (
        f": {', '.join(files)}" if files else ", which you get with the first step"
    )
    console.print(then)
    solved = solved_of(hunt, Progress())
    if told := sorted(hunt.answers(solved) - solved, key=sort_key):
        console.print(f"     [dim]It holds the answers of what you have not solved: {', '.join(told)}[/]")
    console.print(f"lab hunt {hunt.id} --check grades both, lab hint {hunt.number} helps.")


def solved_of(hunt: Hunt, progress: Progress) -> set[str]:
    """The exercises in the hunt's modules that have passed."""
    within = [exercise for exercise in choose(None) if exercise.module in hunt.modules]
    return {exercise.number for exercise in within if progress.state(exercise) == "passed"}


def say_spoiler(hunt: Hunt) -> None:
    """The fault and its variants, and where the post-mortem is."""
    from labs.kit.hunt_grade import spoiler

    console.print(spoiler(hunt), markup=False)
    console.print(f"[dim]what happened in the real server: solutions/{PHASE}/README.md, {hunt.number}[/]")


def run_broken(hunt: Hunt, command: list[str]) -> int:
    """Run a command on the engine with the fault in it; its exit status."""
    path = FOLDER / "hunts" / f"{hunt.id:02}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({module: source.text for module, source in hunt.broken().items()}))
    try:
        return subprocess.run(command, env=environment(str(path))).returncode
    except OSError as error:
        raise LabError(f"'{command[0]}' cannot be run: {error.strerror}") from None


def check_hunts(hunts: list[Hunt]) -> bool:
    """Grade, say what came out, remember what passed; whether all did."""
    from labs.kit.hunt_grade import grade_hunt

    progress, passed = Progress(), 0
    for hunt in hunts:
        of_test = f"{hunt.number} test"  # in the list of what passed, beside the whole hunt
        try:
            is_right = progress.passed.get(of_test) == hunt.digest(with_fixes=False)
            if hunt.state(progress) == "started":
                engines = "the sound engine, the broken one, its variants and those of other hunts"
                what = "your fix" if is_right else f"your test on {engines}; that takes a while"
                console.print(f"[dim]Checking {hunt.number}: {what}[/]")
            grade = grade_hunt(hunt, is_right, solved_of(hunt, progress))
        except LabError as error:
            if len(hunts) == 1:
                raise
            console.print(f"{SIGNS['failed']} {hunt.number} {escape(hunt.title)}\n    {escape(str(error))}")
            continue
        progress.is_stuck_at(None if grade.state == "passed" else hunt.number)
        if grade.step == "fix":
            with progress.changing():
                progress.passed[of_test] = hunt.digest(with_fixes=False)
        console.print(
            f"{SIGNS[grade.state]} {hunt.number} {escape(hunt.title)}  [dim]{grade.seconds:.1f} s[/]"
        )
        for problem in grade.problems:
            console.print("\n".join(f"    {line}" for line in problem.splitlines()), markup=False)
        for line in next_step(grade):
            console.print(f"    {line}")
        passed += grade.state == "passed"
        if grade.state == "passed":
            with progress.changing():
                progress.passed[hunt.number] = grade.digest
    if len(hunts) > 1:
        console.print(f"{passed} of {len(hunts)} hunts")
    return passed == len(hunts)


def next_step(grade: Any) -> list[str]:
    """What to say below a grade."""
    hunt = grade.hunt
    if grade.state == "passed":
        return [f"[dim]lab hunt {hunt.id} --spoil shows what was changed[/]"]
    if grade.step == "fix" and grade.state == "todo":
        files = ", ".join(shown(hunt.fix_file(module)) for module in hunt.modules)
        return [f"[green]Your test is right.[/] Now mend the code: {files}"]
    if grade.state == "todo":
        return [f"TODO {shown(hunt.test_file)}"]
    return []


def hint(hunt: Hunt) -> None:
    """The next of its hints."""
    given = Progress().next_hint(hunt.number, len(hunt.hints))
    console.print(f"[bold]Hint {given} of {len(hunt.hints)}, hunt {hunt.number}: {escape(hunt.title)}[/]")
    console.print(hunt.hints[given - 1].strip("\n"), markup=False)


def reset(hunts: list[Hunt]) -> list[Path]:
    """Put the starters back and take the handed-out code away; returns where the learner's files are kept."""
    kept = []
    for hunt in hunts:
        fixes = [hunt.fix_file(module) for module in hunt.modules]
        for path in [hunt.test_file, *fixes]:
            if path.is_file() and (path in fixes or path.read_text(encoding="utf-8") != hunt.starter):
                kept.append(keep(path, f"{path.parent.name}-{path.stem}"))
        for path in fixes:
            path.unlink(missing_ok=True)
        hunt.test_file.write_text(hunt.starter, encoding="utf-8")
    return kept


def report(which: str) -> dict[str, Any]:
    """For instructors: points of hunts, in the form of the exercises' report."""
    from labs.kit.hunt_grade import grade_hunt

    entries = []
    for grade in map(grade_hunt, choose_hunts(which)):
        entries.append(
            {
                "exercise": grade.hunt.number,
                "title": grade.hunt.title,
                "phase": PHASE,
                "state": grade.state,
                "points": int(grade.state == "passed"),
                "of": 1,
                "tests": {},
                "seconds": round(grade.seconds, 2),
                "message": grade.problems[0] if grade.problems else "",
            }
        )
    return {"points": sum(e["points"] for e in entries), "of": len(entries), "exercises": entries}


def hunt(
    number: Annotated[str | None, typer.Argument(help="A hunt, such as 7; none: all of them.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="Run it on the broken engine, such as `-- pytest FILE`.")
    ] = None,
    grade_it: Annotated[bool, typer.Option("--check", help="Grade your test, and then your fix.")] = False,
    spoil: Annotated[bool, typer.Option("--spoil", help="Show what was broken.")] = False,
) -> None:
    """An incident of a real server: its symptom, and an engine with that fault in it."""
    if number is None:
        return list_hunts()
    hunt = only_hunt(f"8.{number.removeprefix('8.')}")
    if command:
        raise typer.Exit(run_broken(hunt, command))
    if grade_it:
        raise typer.Exit(0 if check_hunts([hunt]) else 1)
    return (say_spoiler if spoil else tell)(hunt)
