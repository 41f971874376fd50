"""Predict, then measure: what a notebook asks of its reader, and the picture and the comparison of what came out."""

import json
import math
import os
import subprocess
import sys
from typing import Literal

from labs.kit.measures import QUESTIONS, Counts
from labs.kit.overlay import Todo, learners_sources
from labs.kit.regions import ROOT, named_phase

OURS, THEIRS, GUESS = "#0072B2", "#E69F00", "#222222"


def is_theirs(phase: str) -> bool:
    """Whether code of this phase comes from the learner here.   phase: such as `3`"""
    selection = os.environ.get("MINIVLLM_LABS", "")
    if not selection or selection.endswith(".json"):  # none, or a hunt's engine
        return False
    folder = ROOT / "labs" / named_phase(phase)
    return any(folder == ROOT.joinpath(s.path).parent for s in learners_sources(selection).values())


def measured(phase: str) -> tuple[Counts, Counts | None]:
    """Our counts, and those of the learner's code: None where the phase is ours, or is still to do."""
    question = QUESTIONS[phase]
    if not is_theirs(phase):
        return question.count(), None
    command = [sys.executable, "-m", "labs.kit.measures", phase]
    clean = {**os.environ, "MINIVLLM_LABS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = json.loads(done.stdout)
    try:
        return ours, question.count()
    except Todo as todo:
        print(f"your code: TODO {todo}")
        return ours, None


def predict(phase: str, guess: float | None) -> None:
    """Say what came out of our code, and of the learner's where the phase is theirs, and why; draw it beside the guess.

    phase   such as `3`     guess   None: the reader has not guessed, and no number is given away
    """
    question = QUESTIONS[phase]
    print(question.text)
    if guess is None:
        print("Put your number into `my_guess` and run this cell again: then you see what was counted.")
    ours, theirs = measured(phase)
    if guess is not None:
        print(f"your guess: {guess:g} {question.unit}; our code: {ours[question.case]:g}")
        if theirs:
            print(f"your code: {theirs[question.case]:g}")
        print(f"why: {question.why}")
    draw(phase, guess, ours, theirs)


def draw(phase: str, guess: float | None, ours: Counts, theirs: Counts | None) -> None:
    """Bars for each case. That which is asked for stays hidden until there is a guess."""
    from labs.kit.plots import picture

    question = QUESTIONS[phase]
    with picture(2.6) as axes:
        places = {case: place for place, case in enumerate(ours)}
        apart = 0.2 if theirs else 0.0
        for who, counts, colour, shift in (("ours", ours, OURS, -apart), ("yours", theirs, THEIRS, apart)):
            shown = {c: n for c, n in (counts or {}).items() if guess is not None or c != question.case}
            if shown:
                axes.bar(
                    [places[c] + shift for c in shown], list(shown.values()), 0.38, color=colour, label=who
                )
        asked = places[question.case]
        if guess is None:
            axes.text(asked, 0, "?", ha="center", va="bottom", fontsize=24, color=GUESS)
        else:
            axes.plot([asked - 0.45, asked + 0.45], [guess, guess], "--", color=GUESS, label="your guess")
        axes.set_xticks(range(len(ours)), list(ours))
        axes.set(ylabel=question.unit, xlim=(-0.6, len(ours) - 0.4), ylim=(0, None))
        axes.legend(frameon=False, loc="upper left")


def compare(
    unit: str,
    engine: dict[str, object],
    yours: dict[str, object],
    within: float = 1e-3,
    better: Literal["more", "less"] | None = None,
) -> None:
    """Print what the engine has and what the learner's function says for each case, and a sentence.

    A missing or None answer is one that is not written yet.

    within  how far numbers that agree may be apart, as a share
    better  where the learner is to do as well as the engine or better, and not the same: which numbers are better
    """
    if better:
        _contest(unit, engine, yours, within, better)
        return
    wrong = [case for case, right in engine.items() if not _agrees(right, yours.get(case), within)]
    _print_both(unit, engine, yours, dict.fromkeys(wrong, "<"))
    if not wrong:
        print(f"Yours agrees in all {len(engine)}.")
        return
    first, said = wrong[0], yours.get(wrong[0])
    if said is None:
        print(f"Yours says nothing of {first} yet.")
        return
    told = f"for {first} it says {_short(said)}, and the engine has {_short(engine[first])}"
    print(f"Yours differs in {len(wrong)} of {len(engine)}: {told}.")


def _contest(
    unit: str, engine: dict[str, float], yours: dict[str, float | None], within: float, better: str
) -> None:
    """As `compare`, of two that do the same work, one of them better."""
    said = {}
    for case, theirs in engine.items():
        mine = yours.get(case)
        if mine is None:
            said[case] = "missing"
        elif _agrees(theirs, mine, within):
            said[case] = "level"
        else:
            said[case] = "ahead" if (mine > theirs) is (better == "more") else "behind"
    _print_both(unit, engine, yours, said)
    if missing := [case for case, word in said.items() if word == "missing"]:
        print(f"Yours says nothing of {missing[0]} yet.")
        return
    ahead, level, behind = map(list(said.values()).count, ("ahead", "level", "behind"))
    print(f"Yours is ahead in {ahead}, level in {level} and behind in {behind}: {better} is better.")


def _print_both(
    unit: str, engine: dict[str, object], yours: dict[str, object], marks: dict[str, str]
) -> None:
    """A line for each case.   marks: of some cases what ends their line"""
    width = max(map(len, ["", *engine]))
    print(f"{'':{width}}  {'the engine':>14}  {'yours':>14}   {unit}")
    for case, right in engine.items():
        line = f"{case:{width}}  {_short(right):>14}  {_short(yours.get(case)):>14}"
        print(f"{line}   {marks[case]}" if case in marks else line)


def _agrees(right: object, said: object, within: float) -> bool:
    if isinstance(right, bool) is not isinstance(said, bool):
        return False
    if isinstance(right, (int, float)) and isinstance(said, (int, float)):
        return math.isclose(right, said, rel_tol=within, abs_tol=1e-9)
    return right == said


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
