"""`python -m benchmarks.reads --beside`: what a read costs beside a thread that runs steps. See README.md."""

import json
import resource
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import SHAPES
from benchmarks.report import Report
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.config import LoRAConfig
from minivllm.economics import shapes_of
from minivllm.gpu.page_locked import PageLockedMemory
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.lora.wrapping import WrappedModules
from minivllm.models.config import ModelArchitecture
from minivllm.worker.cpu_threads import set_num_threads

RANKS = (4, 8, 10, 16)
PYTHON_MS, WAIT_MS = 6.0, 6.0  # of a step: with the interpreter's lock, and for a GPU without it


class Writer(SlotWriter):
    """Stages as on a GPU, in pieces that are touched and kept. Nobody locks them."""

    def __init__(self, wrapped: WrappedModules, device: str) -> None:
        super().__init__(wrapped, device)
        self.on_gpu, self.memory = True, PageLockedMemory(lambda piece: lambda: None, lambda: None)


def source_of(model: Path) -> AdapterSource:
    """What an engine with a GPU reads and stages by, of a model that has only shapes."""
    config = LoRAConfig(max_loras=1, max_lora_rank=max(RANKS))
    architecture = ModelArchitecture.from_folder(model)
    manager = shapes_of(architecture, config, dtype=torch.bfloat16, make_slot_writer=Writer)
    return AdapterSource(manager)


def write_files(folder: Path, shape: str) -> tuple[Path, list[LoRARequest]]:
    """The shape of a model, and an adapter of each rank."""
    model = folder / shape
    model.mkdir()
    config = json.loads((SHAPES / shape / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    for rank in RANKS:
        save_random_adapter(folder / str(rank), str(model), rank, seed=rank, dtype=torch.bfloat16)
    return model, [LoRARequest(str(rank), rank, str(folder / str(rank))) for rank in RANKS]


@contextmanager
def steps_beside(python_ms: float, wait_ms: float) -> Iterator[list[float]]:
    """Inside, a thread runs steps: their ms, as they come. No step where both times are 0."""
    is_over, steps, numbers = threading.Event(), [], torch.ones(16)

    def run() -> None:
        while not (is_over.is_set() and steps):
            started = time.perf_counter()
            while time.perf_counter() < started + python_ms / 1e3:
                sum(number * number for number in range(300))  # 15 us of Python, then a launch
                numbers.mul_(1.0)
            time.sleep(wait_ms / 1e3)
            steps.append(1e3 * (time.perf_counter() - started))

    thread = threading.Thread(target=run)
    if python_ms or wait_ms:
        thread.start()
    try:
        yield steps
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()


def read_all(source: AdapterSource, requests: Sequence[LoRARequest], threads: int) -> dict[str, float]:
    """Read and stage all, so many at a time. Medians: ms, ms of the thread's CPU, and how often it had to wait.

    The files are in memory. What a thread waits for is the interpreter's lock.
    """
    held: list[LoRAModel] = []

    def read(request: LoRARequest) -> list[float]:
        marks = [_mark()]
        lora = source.load(request)
        marks.append(_mark())
        source.manager.stage(lora)
        marks.append(_mark())
        held.append(lora)
        return [b - a for first, second in pairwise(marks) for a, b in zip(first, second)]

    started = time.perf_counter()
    with ThreadPoolExecutor(threads, initializer=partial(set_num_threads, 1)) as pool:
        columns = zip(*pool.map(read, requests))
    names = (f"{part}_{what}" for part in ("read", "stage") for what in ("ms", "cpu_ms", "waits"))
    medians = {name: statistics.median(column) for name, column in zip(names, columns)}
    return {"adapters_per_second": len(requests) / (time.perf_counter() - started), **medians}


def _mark() -> tuple[float, float, int]:
    """Of this thread: ms by the clock, ms of CPU, and how often it has waited."""
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 1e3 * time.perf_counter(), 1e3 * time.thread_time(), waits


def run(options: Namespace, result: Report, folder: Path, shape: str = "llama-8b") -> None:
    """A row beside steps and one without, for each number of threads: medians. A round before is not counted."""
    model, kinds = write_files(folder, shape)
    source, requests = source_of(model), [kinds[number % len(kinds)] for number in range(options.adapters)]
    found: dict[tuple[bool, int], list[dict[str, float]]] = {}
    for number in range(1 + options.rounds):
        for is_beside in (True, False):
            for threads in options.threads:
                with steps_beside(*(PYTHON_MS, WAIT_MS) if is_beside else (0, 0)) as steps:
                    row = read_all(source, requests, threads)
                if number:
                    row["step_ms"] = statistics.median(steps or [0])
                    found.setdefault((is_beside, threads), []).append(row)
    for (is_beside, threads), rounds in found.items():
        medians: dict[str, Any] = {
            name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]
        }
        result.add({"beside": "steps" if is_beside else "nothing", "threads": threads, **medians})
