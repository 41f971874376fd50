"""The price of a switch: an adapter that is in memory goes into a slot that another one has to leave."""

import time
from argparse import Namespace
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from benchmarks.adapters import write_adapters
from benchmarks.decode import prompts
from benchmarks.measure import Step, run_step
from benchmarks.options import engine_args
from benchmarks.report import Report
from minivllm.assembly import LLMEngine
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams

ARRIVAL_TOKENS = 16  # prompt of a request that comes while others decode
STEPS_BETWEEN = 4
WARM_UP = 3


def run(options: Namespace, report: Report, folder: Path) -> None:
    """Both measures on one engine. ValueError unless some adapters are always without a slot."""
    if not 2 <= options.slots < options.adapters:
        raise ValueError("a switch beside running requests needs two slots, and more adapters than slots")
    adapters = write_adapters(folder, options.model, options.adapters, options.rank)
    # Two steps at most until a newcomer is answered, then some without one.
    prompt_and_answer = options.prompt_tokens + 2 * (STEPS_BETWEEN + 1) * (options.switches + WARM_UP) + 8
    args = engine_args(
        options, options.running + 1, prompt_and_answer, options.slots, cpu_loras=options.adapters
    )
    engine = LLMEngine.from_engine_args(args)
    report.add({"measure": "switch", **measure_calls(engine, adapters, options.switches)})
    steps = measure_steps(engine, adapters, options, prompt_and_answer - options.prompt_tokens)
    report.add({"measure": "steps", "running": options.running, **steps})


def measure_calls(engine: LLMEngine, adapters: list[LoRARequest], switches: int) -> dict[str, object]:
    """`add_lora` of adapters in turns: all are in memory and none is in a slot, as slots are fewer.

    call_ms      until the call returns: the host is free again
    complete_ms  until the copies have arrived
    bytes        of one adapter
    """
    put_in_memory(engine, adapters)
    turns = cycle(adapters)
    samples = [timed_switch(engine, next(turns)) for _ in range(switches + WARM_UP)][WARM_UP:]
    call, complete = np.median(samples, axis=0).tolist()
    info = engine.adapters.manager.get_lora_info(adapters[0].lora_int_id)
    return {
        "call_ms": call,
        "complete_ms": complete,
        "bytes": info["bytes"],
        "gb_per_s": info["bytes"] / complete / 1e6,
        "samples_ms": samples,
    }


def put_in_memory(engine: LLMEngine, adapters: list[LoRARequest]) -> None:
    """All of them; the last ones are in the slots then, so that whoever goes on with the first has to switch."""
    for adapter in adapters:
        engine.add_lora(adapter)


def timed_switch(engine: LLMEngine, adapter: LoRARequest) -> tuple[float, float]:
    """Milliseconds of the call, and until its copies have arrived."""
    synchronize()
    with Switches(engine, 1):
        started = time.perf_counter()
        engine.add_lora(adapter)
        called = time.perf_counter()
        synchronize()
        ended = time.perf_counter()
    return 1e3 * (called - started), 1e3 * (ended - started)


def measure_steps(
    engine: LLMEngine, adapters: list[LoRARequest], options: Namespace, output_tokens: int
) -> dict[str, object]:
    """What `options.running` requests that decode with the first adapter feel of a newcomer. Medians in ms.

    decode_ms    a step in which nothing else happens
    copy_ms      one beside which the newcomer's adapter comes into its slot; on a CPU the step that answers it
    arrival_ms   one that answers a short request whose adapter was in a slot
    switch_ms    likewise, one whose adapter was not
    arrival_ttft_ms, switch_ttft_ms   how long the newcomer itself waits for its token
    """
    put_in_memory(engine, adapters)
    busy, others = adapters[0], cycle(adapters[1:])
    vocab_size = engine.config.model_config.get_vocab_size()
    long = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts(options.running, options.prompt_tokens, vocab_size)):
        engine.add_request(f"running-{number}", {"prompt_token_ids": prompt}, long, lora_request=busy)
    while len(run_step(engine).emitted) < options.running:
        pass
    samples: dict[str, list[float]] = {
        kind: [] for kind in ("decode", "copy", "arrival", "switch", "arrival_ttft", "switch_ttft")
    }
    for number in range(2 * (options.switches + WARM_UP)):
        samples["decode"] += [1e3 * run_step(engine).seconds for _ in range(STEPS_BETWEEN - 1)]
        kind, adapter = ("switch", next(others)) if number % 2 else ("arrival", busy)
        steps = answer_short_request(engine, f"arrival-{number}", adapter, switches=number % 2)
        samples[kind].append(1e3 * steps[-1].seconds)
        if kind == "switch":
            samples["copy"].append(1e3 * steps[0].seconds)
        samples[f"{kind}_ttft"].append(1e3 * (steps[-1].ended - steps[0].started))
    engine.abort_request([f"running-{number}" for number in range(options.running)])
    samples = {kind: values[WARM_UP:] for kind, values in samples.items()}
    medians = {f"{kind}_ms": float(np.median(values)) for kind, values in samples.items()}
    return {**medians, "samples_ms": samples}


def answer_short_request(
    engine: LLMEngine, request_id: str, adapter: LoRARequest, switches: int
) -> list[Step]:
    """The steps until a short request that wants one token is answered."""
    (prompt,) = prompts(1, ARRIVAL_TOKENS, engine.config.model_config.get_vocab_size())
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=adapter)
    with Switches(engine, switches):
        steps = [run_step(engine)]
        while request_id not in steps[-1].emitted:
            steps.append(run_step(engine))
    return steps


class Switches:
    """RuntimeError unless as many adapters were copied into slots inside as there should be."""

    def __init__(self, engine: LLMEngine, switches: int) -> None:
        self.count: Callable[[], int] = lambda: engine.get_metrics()["lora"]["activations"]
        self.switches = switches

    def __enter__(self) -> None:
        self.before = self.count()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self.count() - self.before != self.switches:
            raise RuntimeError(f"{self.count() - self.before} adapters went into slots, not {self.switches}")


def synchronize() -> None:
    """Wait until the device has done all it was told to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
