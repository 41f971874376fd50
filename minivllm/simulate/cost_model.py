"""Seconds that a step takes. Stands for the forward pass, for copies into slots and for reads from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minivllm.core.output import SchedulerOutput
from minivllm.gpu.cuda_graphs import MOST_TOKENS, mixed_sizes, smallest_that_holds


class StepWork(NamedTuple):
    """What is computed in a step, or in several together.

    steps           how many
    prompt_steps    of these, how many have a row of more than one token
    requests        rows: requests that get tokens
    tokens          computed
    context         tokens whose keys and values are read, summed over rows
    pairs           of a query and a key, in thousands
    lora            steps in which any row has an adapter
    adapters        distinct ones of a step
    lora_tokens     tokens of rows with an adapter
    ranks           summed over the distinct adapters of a step
    admitted        requests that join
    """

    steps: float = 0.0
    prompt_steps: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    context: float = 0.0
    pairs: float = 0.0
    lora: float = 0.0
    adapters: float = 0.0
    lora_tokens: float = 0.0
    ranks: float = 0.0
    admitted: float = 0.0


class Held(NamedTuple):
    """Why the device may wait for the host before a step.

    checks    adapters that requests named for the first time, which the host looked through
    taken     adapters that had been read, which it takes in
    prompts   1 if the step has prompts and is launched during reads
    reads     how many adapters are being read then
    """

    checks: int = 0
    taken: int = 0
    prompts: int = 0
    reads: int = 0

    @property
    def stretch(self) -> int:
        """Threads that share the interpreter: what the host does takes so many times as long."""
        return 1 + self.reads


def work_of(output: SchedulerOutput, ranks: Mapping[int, int]) -> StepWork:
    """The work of a scheduled step, before its tokens count as computed.   ranks: adapter id -> rank"""
    context = pairs = lora_tokens = 0
    adapters = set()
    for request, tokens, _ in output.scheduled:
        before = request.num_computed_tokens
        context += before + tokens
        pairs += tokens * (before + (tokens + 1) / 2)
        if request.adapter_id:
            adapters.add(request.adapter_id)
            lora_tokens += tokens
    return StepWork(
        steps=1,
        prompt_steps=float(output.total_num_scheduled_tokens > len(output.scheduled)),
        requests=len(output.scheduled),
        tokens=output.total_num_scheduled_tokens,
        context=context,
        pairs=pairs / 1000,
        lora=float(bool(adapters)),
        adapters=len(adapters),
        lora_tokens=lora_tokens,
        ranks=sum(ranks[adapter_id] for adapter_id in adapters),
        admitted=len(output.cached_tokens),
    )


@lru_cache
def graph_sizes() -> list[int]:
    return mixed_sizes(MOST_TOKENS)


def graph_size(tokens: float) -> float:
    """Tokens of the graph that runs a step with prompts; where there is none, its own."""
    return smallest_that_holds(graph_sizes(), tokens) or tokens


def on_curve(curve: Sequence[Sequence[float]], tokens: float) -> float:
    """Seconds by so many tokens: between two points on the line. Further out in proportion to the last one."""
    places, seconds = zip(*curve)
    if tokens > places[-1]:
        return seconds[-1] * tokens / places[-1]
    return float(np.interp(tokens, places, seconds))


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, of a copy into a slot and of a read from disk.

    step                field of `StepWork` -> seconds for each, of the device
    copy_s, read_s      seconds of each copy and each read, whatever its size
    copy_bytes_per_s    from memory into a slot
    read_bytes_per_s    from disk into memory
    unpack_s, unpack_bytes_per_s   of each read after that, of the host: readers that do it at the same time share it
    check_s, take_in_s  of the host, before it launches a step: for each adapter that the engine never saw before, to
                        look it through, and for each one that was read, to take it into memory and into a slot
    during_reads_s      of the host, to launch a step with prompts during reads, more than without
    concurrent_copies   a copy runs concurrently with a step, as on a GPU; else the step waits for it
    slowed_s            by so much a copy slows the step that it runs concurrently with
    bytes_per_rank      bytes of an adapter, by its rank
    prompts, lora_prompts   [tokens, seconds] of steps with prompts, ascending, which come on top of `step`: such a step
                        takes as long as what lies on the line between two of them. Those with adapters have their own
    launch_s            of the host, until a step is launched; 0 where `step` has it
    graph_tokens        steps of at most so many tokens are CUDA graphs, which the engine launches one step ahead (see
                        minivllm/ahead). Before others it reads the tokens of the step before
    kernels_s, lora_kernels_s   of the host, to launch the kernels of a step that is no graph, one by one, without
                        adapters and with. However little there is to compute, the device is not through before
    source              what it was fitted to
    """

    step: dict[str, float] = field(default_factory=dict)
    copy_s: float = 0.0
    copy_bytes_per_s: float = 43e9
    read_s: float = 0.0
    read_bytes_per_s: float = 2e9
    unpack_s: float = 0.0
    unpack_bytes_per_s: float = float("inf")
    check_s: float = 0.0
    take_in_s: float = 0.0
    during_reads_s: float = 0.0
    concurrent_copies: bool = True
    slowed_s: float = 0.0
    bytes_per_rank: float = 5_242_880.0
    prompts: list[list[float]] = field(default_factory=list)
    lora_prompts: list[list[float]] = field(default_factory=list)
    launch_s: float = 0.0
    graph_tokens: int = 0
    kernels_s: float = 0.0
    lora_kernels_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if unknown := sorted(self.step.keys() - set(StepWork._fields)):
            raise ValueError(
                f"a step costs nothing by {unknown[0]!r}; known are {', '.join(StepWork._fields)}"
            )
        for name in ("copy_bytes_per_s", "read_bytes_per_s", "unpack_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}; inf = in no time")

    def step_seconds(self, work: StepWork) -> float:
        seconds = sum(seconds * getattr(work, name) for name, seconds in self.step.items())
        curve = self.lora_prompts if work.lora else self.prompts
        if curve and work.prompt_steps:
            seconds += work.prompt_steps * on_curve(curve, graph_size(work.tokens / work.prompt_steps))
        return seconds

    def copy_seconds(self, num_bytes: float) -> float:
        return self.copy_s + num_bytes / self.copy_bytes_per_s

    def disk_seconds(self, num_bytes: float) -> float:
        return self.read_s + num_bytes / self.read_bytes_per_s

    def read_seconds(self, num_bytes: float) -> float:
        return self.disk_seconds(num_bytes) + self.unpack_seconds(num_bytes)

    def unpack_seconds(self, num_bytes: float) -> float:
        return self.unpack_s + num_bytes / self.unpack_bytes_per_s

    def host_seconds(self, held: Held) -> float:
        """Of the host, before it can launch a step, beyond `launch_s`, if it shares the interpreter with no read."""
        return held.checks * self.check_s + held.taken * self.take_in_s + held.prompts * self.during_reads_s

    def launch_seconds(self, work: StepWork) -> float:
        """Of the host, to launch the kernels of a step one by one; 0 for a graph."""
        if work.tokens <= self.graph_tokens:
            return 0.0
        return self.lora_kernels_s if work.lora else self.kernels_s

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """ValueError for what `save` did not write."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: found[name] for name in (f.name for f in fields(cls))})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"'{path}' is no cost model; make one with `python -m benchmarks.fit`"
            ) from error

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
