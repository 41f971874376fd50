"""`python -m benchmarks.host`: what a step costs the host beside a GPU, measured without one. See README.md.

Scheduler, admission, input preparation, tables of adapters, sampling and outputs are those that a GPU has, in pages and
with captured steps, one step ahead. A captured step does nothing here: its tokens are 0, and they are there at once.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # without it a backend of kernels refuses a CPU

import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.adapters import write_adapters
from benchmarks.arguments import SHAPES, each_once, one_of, run_as_command, whole
from benchmarks.report import Report, default_path
from minivllm.ahead.lookahead import LookaheadCore
from minivllm.assembly import LLMEngine
from minivllm.config import EngineConfig
from minivllm.engine_args import EngineArgs
from minivllm.gpu import make_slot_writer
from minivllm.gpu.cuda_graphs import CapturedOutput, CapturedStep
from minivllm.gpu.paged_attention import build_paged_attention
from minivllm.gpu.step_graphs import StepGraphs
from minivllm.lora.request import LoRARequest
from minivllm.processes import avoid_pauses
from minivllm.sampling_params import SamplingParams

NAME = "python -m benchmarks.host"
CASES = ("decode", "mixed")
RANK = 8
PROMPT_TOKENS = 64
# A batch that decodes is measured while its contexts are about this long.
OUTPUT_TOKENS = 8192


def write_model(folder: Path) -> str:
    """The folder of a small shape whose contexts may be long."""
    shape = json.loads((SHAPES / "tiny" / "config.json").read_text())
    folder.mkdir()
    longest = {"max_position_embeddings": PROMPT_TOKENS + OUTPUT_TOKENS}
    (folder / "config.json").write_text(json.dumps(shape | longest))
    return str(folder)


def engine_beside_nothing(model: str, rows: int, adapters: int) -> LLMEngine:
    """An engine whose host does all that it does beside a GPU, and whose steps compute nothing."""
    args = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        max_num_seqs=rows,
        max_num_batched_tokens=512,  # captured steps hold as many: none is computed
        num_kv_blocks=rows * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16 + 1,
        enable_lora=True,
        max_loras=max(8, adapters),
        max_lora_rank=RANK,
        punica_backend="paged",
        warm_up=False,
    )
    engine = LLMEngine.from_engine_args(args)
    runner = engine.runner
    manager = engine.adapters.manager
    manager.slot_writer = make_slot_writer(manager.wrapped, "cpu")
    manager.slot_writer._scatter = lambda *adapter: None
    runner.build_attention = build_paged_attention(runner.config)
    logits = torch.zeros(rows, runner.config.model_config.get_vocab_size())

    def captured(step: CapturedStep) -> CapturedStep:
        return lambda: CapturedOutput(logits, graphs.output.tokens)

    runner.graphs = graphs = StepGraphs(runner, wrapper=captured)
    avoid_pauses()
    return AheadEngine(engine)


class AheadEngine(LLMEngine):
    """An engine of another one's parts, whose core looks ahead."""

    def __init__(self, engine: LLMEngine) -> None:
        self._other = engine
        super().__init__(engine.config)

    def make_core(self, config: EngineConfig, *others: Any) -> LookaheadCore:
        return LookaheadCore(config, self._other.executor, self._other.scheduler, self._other.adapters)


class Traffic:
    """As many requests as there are rows, of each adapter in turns; None is base."""

    def __init__(self, engine: LLMEngine, rows: int, adapters: Sequence[LoRARequest | None]) -> None:
        self.engine, self.rows, self.adapters = engine, rows, adapters
        self._ids = count()

    def add(self, output_tokens: int) -> None:
        number = next(self._ids)
        self.engine.add_request(
            str(number),
            [1 + (number * 31 + place) % 100 for place in range(PROMPT_TOKENS)],
            SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True),
            lora_request=self.adapters[number % len(self.adapters)],
        )

    def decode(self) -> Iterator[None]:
        """Everybody decodes, for ever."""
        for _ in range(self.rows):
            self.add(OUTPUT_TOKENS)
        yield from iter(lambda: None, 0)

    def mixed(self) -> Iterator[None]:
        """In each step one request ends, and another comes in its place."""
        for number in range(self.rows):
            self.add(number + 2)
        while True:
            for _ in range(self.rows - len(self.engine.scheduler.requests)):
                self.add(self.rows)
            yield


class Calls:
    """Calls of Python functions, and of C functions by Python, by the module that is called or calls."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.c = 0

    def of(self, work: Callable[[], Any]) -> None:
        """Count those of `work`."""
        sys.setprofile(self._count)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.python[frame.f_globals.get("__name__", "?")] += 1
        elif event == "c_call":
            self.c += 1


def measure(engine: LLMEngine, traffic: Iterator[None], steps: int) -> dict[str, Any]:
    """Calls and CPU time of a step, with the requests of `traffic`. Coming requests are not counted."""
    for _ in range(300):
        next(traffic)
        engine.step()
    seconds = []
    for _ in range(steps):
        next(traffic)
        started = time.process_time_ns()
        engine.step()
        seconds.append(time.process_time_ns() - started)
    calls, counted = Calls(), 32
    for _ in range(counted):
        next(traffic)
        calls.of(engine.step)
    by_module = {name: round(number / counted, 1) for name, number in calls.python.most_common()}
    deciles = statistics.quantiles(seconds, n=10)
    return {
        "cpu_ms": round(statistics.median(seconds) / 1e6, 4),
        "cpu_ms_p10": round(deciles[0] / 1e6, 4),
        "cpu_ms_p90": round(deciles[-1] / 1e6, 4),
        "python_calls": round(calls.python.total() / counted),
        "c_calls": round(calls.c / counted),
        "by_module": by_module,
    }


def run(options: Namespace, result: Report, folder: Path) -> None:
    """One row for each case."""
    model = write_model(folder / "model")
    adapters = write_adapters(folder, model, options.adapters, RANK)
    for case in options.cases:
        engine = engine_beside_nothing(model, options.requests, options.adapters)
        traffic = Traffic(engine, options.requests, adapters or [None])
        result.add({"case": case, **measure(engine, getattr(traffic, case)(), options.steps)})


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--requests", type=whole(2), default=128, help="that run at the same time")
    parser.add_argument("--adapters", type=whole(0), default=8, help="that they use in turns")
    parser.add_argument("--steps", type=whole(2), default=1000, help="that are timed")
    parser.add_argument("--cases", type=each_once(one_of(CASES)), default=list(CASES))
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    options = parser.parse_args(arguments)
    kept = {key: value for key, value in vars(options).items() if key not in ("cases", "json")}
    result = Report(options.json or default_path("host", "cpu"), "host", kept, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        run(options, result, Path(folder))


if __name__ == "__main__":
    run_as_command(NAME, main)
