"""The fixed workload: P equal requests at once, decoded to their end, with and without adapters."""

import gc
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.adapters import write_adapters, write_dora_adapters, write_mixes
from benchmarks.arguments import DORA, MIX
from benchmarks.measure import HostShare, Step, decode_summary, median_of, run_to_end
from benchmarks.options import engine_args, free_memory
from benchmarks.report import Report
from minivllm.assembly import LLMEngine
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams

# Fewer adapters than this are served from an engine with this many slots, as a user would.
SLOTS = 8
WARM_UP_TOKENS = 8
# Kind of adapters -> (folder, model, how many, rank) -> requests that name them.
WRITE = {"": write_adapters, DORA: write_dora_adapters, MIX: write_mixes}


@dataclass(frozen=True)
class Case:
    """What the requests use.

    name       "base" (LoRA off), "none" (LoRA on, nobody uses it), the number of adapters, or that of others than
               plain ones ("8-dora", "8-mix")
    adapters   that the requests take in turns
    slots      of the engine; 0 = LoRA off
    kind       of the adapters: "" plain ones, or how the name ends
    """

    name: str
    adapters: int
    slots: int
    kind: str = ""

    @classmethod
    def parse(cls, name: str) -> "Case":
        """ValueError for what is neither a name nor a number of adapters."""
        if name == "base":
            return cls(name, 0, 0)
        if name == "none":
            return cls(name, 0, SLOTS)
        kind = next((end for end in WRITE if end and name.endswith(end)), "")
        count = name.removesuffix(kind)
        if not count.isdigit() or not int(count):
            raise ValueError(f"unknown case '{name}'; use base, none, 8, 8{DORA}, or 8{MIX}")
        return cls(name, int(count), max(SLOTS, int(count)), kind)


def run(options: Namespace, report: Report, folder: Path) -> None:
    """Measure every case with every number of requests; one engine for all cases with as many slots."""
    cases = [Case.parse(name) for name in options.cases]
    adapters = {
        kind: write(
            folder, options.model, max(c.adapters if c.kind == kind else 0 for c in cases), options.rank
        )
        for kind, write in WRITE.items()
    }
    for slots in sorted({case.slots for case in cases}):
        run_on_one_engine(options, report, [case for case in cases if case.slots == slots], adapters)
        free_memory()


def run_on_one_engine(
    options: Namespace, report: Report, cases: list[Case], adapters: dict[str, list[LoRARequest]]
) -> None:
    """All cases of equal slots. A case with more adapters than requests is left out: not all would be used.

    adapters   by their kind
    """
    started = time.perf_counter()
    most = max(options.requests)
    longest = options.prompt_tokens + options.output_tokens
    engine = LLMEngine.from_engine_args(engine_args(options, most, longest, cases[0].slots))
    load_seconds = time.perf_counter() - started
    for case in cases:
        for requests in options.requests:
            if case.adapters <= requests:
                row = {"case": case.name, "slots": case.slots, "requests": requests}
                row |= measure(engine, options, requests, adapters[case.kind][: case.adapters])
                report.add({**row, "engine_load_s": load_seconds})


def measure(
    engine: LLMEngine, options: Namespace, requests: int, adapters: list[LoRARequest]
) -> dict[str, object]:
    """Medians over `options.repeats` passes, after one short pass that loads adapters and compiles kernels."""
    run_pass(engine, options, requests, adapters, WARM_UP_TOKENS)
    share = HostShare(engine)
    passes = [
        decode_summary(run_pass(engine, options, requests, adapters, options.output_tokens), requests)
        for _ in range(options.repeats)
    ]
    return {**median_of(passes), "outside_runner_share": share.read(), "passes": passes}


def run_pass(
    engine: LLMEngine, options: Namespace, requests: int, adapters: list[LoRARequest], output_tokens: int
) -> list[Step]:
    """Queue all requests, then step until all are answered. Adapters go round robin."""
    gc.collect()  # every pass starts with the same debt to the garbage collector: none
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    vocab_size = engine.config.model_config.get_vocab_size()
    for number, prompt in enumerate(prompts(requests, options.prompt_tokens, vocab_size)):
        lora = adapters[number % len(adapters)] if adapters else None
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, params, lora_request=lora)
    return run_to_end(engine)


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> Iterator[list[int]]:
    """`count` prompts of random tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(vocab_size, (length,), generator=generator).tolist()
