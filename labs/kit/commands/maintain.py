"""`lab mutants`, `lab variants` and `lab sync`, for maintainers."""

from typing import Annotated

import typer
from rich.markup import escape

from labs.kit.commands.shared import SIGNS, Which, choose, console
from labs.kit.regions import Exercise


def mutants(
    which: Which = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Of each exercise one mistake, by a hash.")
    ] = False,
    generic: Annotated[
        bool, typer.Option("--generic", help="Not classic mistakes: every small change of the code.")
    ] = False,
) -> None:
    """Put in every classic mistake and see the exercise's tests catch it."""
    from labs.kit.mutants import check_mutants

    if generic:
        raise typer.Exit(0 if say_strength(choose(which), sample) else 1)

    bad = total = 0
    for verdict in check_mutants(choose(which), sample=sample):
        total += verdict.mutant is not None
        bad += not verdict.is_good
        name = verdict.mutant.name if verdict.mutant else "(the engine)"
        sign = SIGNS["passed" if verdict.is_good else "failed"]
        console.print(f"{sign} {verdict.exercise} {name}: {escape(verdict.text)}")
    console.print(f"{total} mutants, {bad} to look at")
    raise typer.Exit(1 if bad else 0)


def variants(
    which: Which = None,
    sample: Annotated[bool, typer.Option("--sample", help="Of each phase one, by a hash.")] = False,
) -> None:
    """Another right answer to every exercise, written from its last hint, must pass."""
    from labs.kit.variants import check_variants, one_a_phase

    bad = 0
    for verdict in check_variants(one_a_phase(choose(which)) if sample else choose(which)):
        bad += not verdict.is_good
        sign = SIGNS["passed" if verdict.is_good else "failed"]
        console.print(f"{sign} {verdict.exercise}: {escape(verdict.text)}")
    raise typer.Exit(1 if bad else 0)


def say_strength(chosen: list[Exercise], sample: bool) -> bool:
    """Measure, say what no test sees and each phase's score; whether that is enough."""
    from labs.kit.strength import by_phase, is_strong, measure

    strengths = []
    for strength in measure(chosen, at_most=1 if sample else None):
        strengths.append(strength)
        console.print(f"{strength.exercise.number}: {strength.killed} of {strength.tried} changes are seen")
        for mutation in strength.survived:
            console.print(
                f"  {mutation.function}\n    - {escape(mutation.old)}\n    + {escape(mutation.new)}"
            )
        for sentence in strength.wrong:
            console.print(f"  [red]{escape(sentence)}[/]")
    for phase, (killed, tried) in by_phase(strengths).items():
        console.print(f"{phase}: {killed} of {tried}, {killed / tried:.1%}" if tried else f"{phase}: none")
    return is_strong(strengths, sample)


def sync(
    only_look: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")
    ] = False,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="Remember these starters for `lab migrate`; with --check: see that it knows them.",
        ),
    ] = False,
) -> None:
    """Generate starters, their hashes and the code in solutions and chapters."""
    from labs.kit.migrate import record_release, unreleased
    from labs.kit.sync import sync as sync_files

    stale, left_alone = sync_files(write=not only_look)
    for name in stale:
        console.print(f"{'out of date' if only_look else 'written'}: {name}")
    for sentence in left_alone:
        console.print(f"[yellow]{escape(sentence)}[/]")
    if not stale:
        console.print("everything generated is up to date")
    if release and not only_look:
        record_release()
    unknown = unreleased() if release else []
    for name in unknown:
        console.print(f"not yet in labs/released.json: {name}")
    raise typer.Exit(1 if only_look and (stale or unknown) else 0)
