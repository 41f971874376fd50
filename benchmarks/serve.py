"""Random traffic in real time: the same arrivals to a base engine, and to one with adapters."""

import threading
import time
from argparse import Namespace
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.adapters import ranks_of, write_adapters
from benchmarks.decode import prompts
from benchmarks.measure import Step, gaps, percentiles, run_to_end, token_times
from benchmarks.options import engine_args, free_memory
from benchmarks.report import Report
from benchmarks.step_record import StepRecord, as_text, facts
from minivllm.assembly import LLMEngine
from minivllm.lora.request import LoRARequest
from minivllm.processes import avoid_pauses
from minivllm.sampling_params import SamplingParams
from minivllm.serving.adapter_reader import PARALLEL_READS, AdapterReader
from minivllm.simulate.traffic import Arrival, Lengths, make_traffic

WARM_UP_REQUESTS, WARM_UP_TOKENS = 32, 4
READERS = 12  # before the first request
LONGEST_READ = 1.0  # seconds; whoever waits for longer looks again
COUNTERS = ("loads", "load_seconds", "activations", "evictions", "cpu_evictions")


def run(options: Namespace, report: Report, folder: Path) -> None:
    """The base engine first, then the one with adapters."""
    traffic = traffic_of(options, options.num_requests, options.seed)
    adapters = write_adapters(folder, options.model, options.adapters, options.rank, options.lowest_rank)
    for case in options.cases:
        slots = options.slots if case == "lora" else 0
        arrivals = [replace(arrival, adapter=None) for arrival in traffic] if slots == 0 else traffic
        report.add({"case": case, "slots": slots, **measure(options, arrivals, adapters, slots)})
        free_memory()


def traffic_of(options: Namespace, requests: int, seed: int) -> list[Arrival]:
    prompt = Lengths(options.prompt_median, options.sigma, 8, options.prompt_max)
    output = Lengths(options.output_median, options.sigma, 2, options.output_max)
    return make_traffic(requests, options.rate, options.adapters, options.alpha, prompt, output, seed)


def measure(
    options: Namespace, traffic: list[Arrival], adapters: list[LoRARequest], slots: int | None
) -> dict[str, object]:
    """One engine, warmed up, served the traffic. Adapters are in memory beforehand unless the start is cold."""
    engine = warm_engine(options, traffic, adapters, slots)
    return measure_on(engine, options, traffic, adapters)


def warm_engine(
    options: Namespace, traffic: list[Arrival], adapters: list[LoRARequest], slots: int | None
) -> LLMEngine:
    longest = options.prompt_max + options.output_max
    cpu_loras = options.cpu_loras or max(options.adapters, slots or 0)
    args = engine_args(options, options.max_num_seqs, longest, slots, cpu_loras)
    policies = {"eviction_policy": options.eviction_policy, "scheduling_policy": options.scheduling_policy}
    engine = LLMEngine.from_engine_args(replace(args, **policies))
    warm_up(engine, traffic, adapters)
    if slots != 0:
        for arrival in traffic[:WARM_UP_REQUESTS]:
            engine.remove_lora(adapters[arrival.adapter].lora_int_id)
        load(engine, [adapters[number] for number in loaded_before(options)])
    return engine


def loaded_before(options: Namespace) -> list[int]:
    """Numbers of the adapters that are loaded before the first request, the one used longest ago first.

    They are those that `--earlier-requests` would have asked for; all if that is not given, none at a cold start.
    """
    if options.cold:
        return []
    if options.earlier_requests is None:
        return list(range(options.adapters))
    earlier = traffic_of(options, options.earlier_requests, options.seed + 1)
    last_use_first = dict.fromkeys(arrival.adapter for arrival in reversed(earlier))
    return list(last_use_first)[: options.cpu_loras][::-1]


def load(engine: LLMEngine, adapters: list[LoRARequest]) -> None:
    """In this order, read by many threads."""
    reader = AdapterReader(engine, READERS, lambda: None)
    reads = [reader.begin_ahead(adapter) for adapter in adapters[:READERS]]
    for number, adapter in enumerate(adapters):
        if reads[number] is not None:
            reads[number].result()
        engine.add_lora(adapter)
        reader.end_ahead(adapter)
        reads += [reader.begin_ahead(later) for later in adapters[number + READERS : number + READERS + 1]]
    reader.close()


def measure_on(
    engine: LLMEngine, options: Namespace, traffic: list[Arrival], adapters: list[LoRARequest]
) -> dict[str, object]:
    before = counters(engine)
    ranks = dict(enumerate(ranks_of(options.adapters, options.rank, options.lowest_rank), 1))
    said: dict[str, object] = {"engine": facts(engine, ranks), "arrivals": arrivals_as_text(traffic)}
    start, record = serve(engine, traffic, adapters, ranks)
    happened = {name: count - before[name] for name, count in counters(engine).items()}
    return {**serve_summary(start, record.steps, traffic), **happened, **said, **as_text(record, start)}


def warm_up(engine: LLMEngine, traffic: list[Arrival], adapters: list[LoRARequest]) -> None:
    """The first requests all at once and cut short: kernels are compiled for the shapes to come."""
    for number, arrival in enumerate(traffic[:WARM_UP_REQUESTS]):
        short = replace(arrival, output_tokens=min(WARM_UP_TOKENS, arrival.output_tokens))
        add(engine, f"warm-up-{number}", short, adapters)
    run_to_end(engine)


def add(engine: LLMEngine, request_id: str, arrival: Arrival, adapters: list[LoRARequest]) -> None:
    vocab_size = engine.config.model_config.get_vocab_size()
    (prompt,) = prompts(1, arrival.prompt_tokens, vocab_size, seed=arrival.prompt_tokens)
    params = SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True)
    lora = None if arrival.adapter is None else adapters[arrival.adapter]
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)


def serve(
    engine: LLMEngine, traffic: list[Arrival], adapters: list[LoRARequest], ranks: dict[int, int]
) -> tuple[float, StepRecord]:
    """Queue every request once its time has come, and step; the start (`time.perf_counter`) and the steps.

    Adapters are read beside the steps, and the garbage collector is kept from pauses, as in the server.
    """
    pending, was_read = deque(enumerate(traffic)), threading.Event()
    reader = engine.adapters and AdapterReader(engine, PARALLEL_READS, was_read.set)
    record = StepRecord(engine, ranks)
    avoid_pauses()
    start = time.perf_counter()
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][1].time_s <= time.perf_counter() - start:
            number, arrival = pending.popleft()
            add(engine, str(number), arrival, adapters)
        was_read.clear()
        if not record.step():  # nobody is here, or all who are wait for their adapters to be read
            until_next = start + pending[0][1].time_s - time.perf_counter() if pending else LONGEST_READ
            was_read.wait(max(0.0, until_next))
    record.close()
    if reader is not None:
        reader.close()
    return start, record


def counters(engine: LLMEngine) -> dict[str, float]:
    """What happened to adapters so far; zeros for an engine without them."""
    lora = engine.get_metrics()["lora"] or {}
    return {name: lora.get(name, 0) for name in COUNTERS}


def serve_summary(start: float, steps: list[Step], traffic: list[Arrival]) -> dict[str, object]:
    """Times from each request's own arrival, also if it came while a step ran.

    tokens_per_second      output tokens, from the first arrival to the last token
    ttft_.., itl_..        as in `decode_summary`; *_quantiles_ms are all percentiles from 0 to 100
    mean_batch             requests that got a token, a step
    """
    times = token_times(steps)
    firsts = [times[str(i)][0] - start - arrival.time_s for i, arrival in enumerate(traffic)]
    between = gaps(times)
    tokens = sum(len(step.emitted) for step in steps)
    seconds = steps[-1].ended - start - traffic[0].time_s
    return {
        "requests": len(traffic),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(traffic) / seconds,
        "mean_batch": tokens / len(steps),
        **percentiles("ttft", firsts),
        **percentiles("itl", between),
        "ttft_quantiles_ms": quantiles_ms(firsts),
        "itl_quantiles_ms": quantiles_ms(between),
    }


def arrivals_as_text(traffic: list[Arrival]) -> list[str]:
    """Of each its seconds after the start, prompt tokens, output tokens, number of its adapter or -1."""
    return [
        f"{a.time_s:.4f} {a.prompt_tokens} {a.output_tokens} {-1 if a.adapter is None else a.adapter}"
        for a in traffic
    ]


def quantiles_ms(seconds: list[float]) -> list[float]:
    return (1e3 * np.percentile(seconds, range(101))).tolist()
