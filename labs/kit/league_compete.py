"""All entrants of `lab league` on all traffics, each entrant in a process of its own."""

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from labs.kit.confine import confine, require_confinement
from labs.kit.judges import Refused
from labs.kit.league import Traffic, play
from labs.kit.league_entrants import Entrant
from labs.kit.limits import (
    LOOK,
    NO_END,
    PATIENCE,
    Watch,
    begin_session,
    kill_session,
    limit_memory,
    room_to_report,
)
from labs.kit.overlay import Todo
from labs.kit.regions import LabError

LIMIT = 120.0  # seconds that an entrant may compute in all
ROOM = 4 << 30  # bytes that it may allocate


@dataclass
class Result:
    """What became of an entrant.

    figures   traffic -> what `play` gives
    why       why it is out of the league; "" if it is in
    where     the traffic on which that was found
    """

    name: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    why: str = ""
    where: Traffic | None = None

    @property
    def said(self) -> str:
        """Why it is out, without a word of traffics that are kept apart: an error's text may hold what it saw."""
        if self.where is not None and self.where.is_apart:
            return "fails on a traffic that is kept apart"
        return self.why


@dataclass
class Job:
    """An entrant that plays."""

    result: Result
    child: BaseProcess
    receiver: Connection
    watch: Watch


def compete(
    entrants: Iterable[Entrant],
    traffics: Sequence[Traffic],
    least: Mapping[str, Mapping[str, float]],
    are_foreign: bool = False,
    workers: int = 2,
    on_end: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """What becomes of each entrant, in their order. Whatever one does, it loses only itself.

    least         traffic -> its bounds
    are_foreign   they are confined (`labs.kit.confine`): LabError where that cannot be
    workers       processes at a time
    """
    if are_foreign:
        require_confinement()
    coming, results, jobs = list(entrants), [], []
    with tempfile.TemporaryDirectory() as folder:
        while coming or jobs:
            while coming and len(jobs) < workers:
                jobs.append(_start(coming.pop(0), traffics, Path(folder) if are_foreign else None))
                results.append(jobs[-1].result)
            wait([job.receiver for job in jobs], LOOK)
            for job in [job for job in jobs if _has_ended(job, traffics, least)]:
                kill_session(job.child)
                job.child.join()
                jobs.remove(job)
                on_end(job.result)
    return results


def _start(entrant: Entrant, traffics: Sequence[Traffic], folder: Path | None) -> Job:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(entrant, traffics, folder, sender), daemon=True)
    child.start()
    sender.close()
    return Job(Result(entrant.name), child, receiver, Watch(child.pid))


def _has_ended(job: Job, traffics: Sequence[Traffic], least: Mapping[str, Mapping[str, float]]) -> bool:
    """Take what a child has said. It has ended when it has played all, is refused, or was too long at it."""
    result = job.result
    result.where = traffics[len(result.figures)]
    try:
        while job.receiver.poll():
            figures, result.why = json.loads(job.receiver.recv_bytes())
            if not result.why and figures["ttft_ms"] < least[result.where.name]["ttft_ms"] * (1 - 1e-9):
                result.why = "it is faster than can be: read its code"
            if result.why:
                return True
            result.figures[result.where.name] = figures
            if len(result.figures) == len(traffics):
                result.where = None
                return True
            result.where = traffics[len(result.figures)]
    except (EOFError, ConnectionResetError):
        result.why = "its process ended before it had played"
        return True
    job.watch.look()
    if what := job.watch.is_late(LIMIT, PATIENCE):
        result.why = f"{NO_END} {LIMIT:.0f} s of {what}, on '{result.where.name}'"
    return bool(what)


def _child(entrant: Entrant, traffics: Sequence[Traffic], folder: Path | None, sender: Connection) -> None:
    begin_session()
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    limit_memory(ROOM) if folder is None else confine(folder, ROOM)
    for traffic in traffics:
        given, figures, why = traffic.given, {}, ""
        try:
            figures = play(entrant.make(), traffic.arrivals(), given["adapters"], given["seed"])
        except (Refused, LabError) as error:
            why = str(error)
        except Todo as error:
            why = f"{error} is still TODO"
        except Exception as error:  # whatever a submission raises puts it out, and nobody else
            lines = [
                f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(entrant.path)
            ]
            why = f"{type(error).__name__}: {error}"[:300] + (f" (line {lines[-1]})" if lines else "")
        with room_to_report():
            sender.send_bytes(json.dumps([figures, why]).encode())
        if why:
            return
