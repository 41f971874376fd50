"""Runs a Python program and writes down what its engine does: `python -m labs.kit.recording PID FILE PROGRAM ...`.

PID is the process that it ends with. It leads a session, and what it starts ends with it, too.

A line of JSON for every call of `step`: its trace record, and beside it

    tokens   request -> the token it got; texts likewise, where there is a tokenizer
    logits   request -> what they were at some places: see `probe`
    errors   request -> why it failed
    error    what the step raised

The last line has `end`: what ended the program, None for nothing special. Without that line it was cut off.
"""

import functools
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from labs.kit.limits import end_with
from labs.kit.regions import LabError
from minivllm.assembly import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.observe.recorder import room
from minivllm.observe.trace import StepRecord
from minivllm.serving import engine_process
from minivllm.worker.row_sampler import PendingStep, RowSampler, Sampled

PLACES = 16  # of the vocabulary, at which logits are kept
FILE_VARIABLE = "MINIVLLM_RECORDING"  # where an engine in a process of its own finds the file
BEGUN = ".begun"  # behind the file's name: a mark that some engine is watched


class Recording:
    """Of the first engine that steps; those that a program makes beside it, wherever they are, are not compared.

    file   where the lines go, each at once: the process may be killed
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.engine: LLMEngine | None = None
        self.steps = 0
        self.sampled: dict[str, dict[str, Any]] = {}  # of the step under way

    def install(self) -> None:
        """From now on every engine of this process is watched."""
        LLMEngine.step = self._around_step(LLMEngine.step)
        RowSampler.sample_step = self._around_sampling(RowSampler.sample_step)

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def _around_step(self, step: Callable[..., list[RequestOutput]]) -> Callable[..., list[RequestOutput]]:
        @functools.wraps(step)
        def watched(engine: LLMEngine, *args: Any, **options: Any) -> list[RequestOutput]:
            if self.engine is None and self._is_first():
                self.engine = engine
                self.write({"room": room(engine)})
            if engine is not self.engine:
                return step(engine, *args, **options)
            before, outputs, error = engine.trace.records[-1:], [], None
            self.sampled = {"tokens": {}, "logits": {}}
            try:
                outputs = step(engine, *args, **options)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
                raise
            finally:
                self._write_step(engine, before, outputs, error)
            return outputs

        return watched

    def _is_first(self) -> bool:
        """Whether no engine has stepped before, in whichever process: the program's, or one that it has started."""
        try:
            os.close(os.open(self.file.name + BEGUN, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _write_step(
        self, engine: LLMEngine, before: list[StepRecord], outputs: list[RequestOutput], error: str | None
    ) -> None:
        after = engine.trace.records[-1:]
        is_new = after and not (before and before[0] is after[0])
        record = after[0] if is_new else StepRecord(self.steps, 0.0)
        texts = {}
        if engine.tokenizer is not None:
            texts = {r: engine.tokenizer.decode([token]) for r, token in self.sampled["tokens"].items()}
        errors = {output.request_id: output.error for output in outputs if output.error}
        more = {"step": self.steps, "texts": texts, "errors": errors, "error": error}
        self.write({**asdict(record), **self.sampled, **more})
        self.steps += 1

    def _around_sampling(self, sample: Callable[..., Sampled]) -> Callable[..., Sampled]:
        @functools.wraps(sample)
        def watched(sampler: RowSampler, step: PendingStep) -> Sampled:
            sampled = sample(sampler, step)
            if self.engine is not None and sampler is self.engine.runner.row_sampler:
                self.sampled["tokens"] = {request: token for request, (token, _) in sampled.items()}
                if step.logits is not None:
                    pairs = zip(step.requests, step.logits)
                    self.sampled["logits"] = {request.request_id: probe(row) for request, row in pairs}
            return sampled

        return watched


def probe(logits: torch.Tensor) -> dict[str, Any]:
    """A few of a row's logits, by which two rows are told apart.   logits: (V,)"""
    places = torch.linspace(0, len(logits) - 1, min(PLACES, len(logits))).long()
    values = [float(f"{value:.7g}") for value in logits[places].tolist()]
    return {"values": values, "largest": float(f"{logits.max().item():.7g}"), "dtype": str(logits.dtype)[6:]}


def run_program(program: str, *arguments: str) -> None:
    """Be `python ...`, or an installed Python program such as `minivllm`. LabError for one of another language."""
    if Path(program).name.startswith("python"):
        if arguments[:1] == ("-m",) and len(arguments) > 1:
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            return
        program, *arguments = arguments or [""]
    path = program if Path(program).is_file() else shutil.which(program)
    if path is None or not _is_python(Path(path)):
        raise LabError(f"'{program}' is no Python program; give one, such as `-- minivllm demo`")
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _is_python(path: Path) -> bool:
    with open(path, "rb") as file:
        return path.suffix == ".py" or b"python" in file.readline(200)


def main(path: str, *command: str) -> None:
    Path(path + BEGUN).unlink(missing_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        recording, end = Recording(file), None
        recording.install()
        os.environ[FILE_VARIABLE], engine_process.HOST = path, "labs.kit.recording_host"
        try:
            run_program(*command)
        except SystemExit as exit_:
            end = f"it ended with exit status {exit_.code}" if exit_.code else None
            raise
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
            raise
        finally:
            recording.write({"end": end})


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    main(*sys.argv[2:])
