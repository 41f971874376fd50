"""Random traffic in real time: the same arrivals to a base engine, and to one with adapters."""

import time
from argparse import Namespace
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.adapters import write_adapters
from benchmarks.decode import prompts
from benchmarks.measure import Step, gaps, percentiles, run_step, run_to_end, token_times
from benchmarks.options import engine_args, free_memory
from benchmarks.report import Report
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.traffic import Arrival, Lengths, make_traffic

WARM_UP_REQUESTS, WARM_UP_TOKENS = 32, 4
COUNTERS = ("loads", "activations", "evictions", "cpu_evictions")


def run(options: Namespace, report: Report, folder: Path) -> None:
    """The base engine first, then the one with adapters."""
    prompt = Lengths(options.prompt_median, options.sigma, 8, options.prompt_max)
    output = Lengths(options.output_median, options.sigma, 2, options.output_max)
    traffic = make_traffic(
        options.num_requests, options.rate, options.adapters, options.alpha, prompt, output, options.seed
    )
    adapters = write_adapters(folder, options.model, options.adapters, options.rank)
    for case in options.cases:
        slots = options.slots if case == "lora" else 0
        arrivals = [replace(arrival, adapter=None) for arrival in traffic] if slots == 0 else traffic
        report.add({"case": case, "slots": slots, **measure(options, arrivals, adapters, slots)})
        free_memory()


def measure(
    options: Namespace, traffic: list[Arrival], adapters: list[LoRARequest], slots: int | None
) -> dict[str, object]:
    """One engine, warmed up, served the traffic. Adapters are in memory beforehand unless the start is cold."""
    engine = warm_engine(options, traffic, adapters, slots)
    return measure_on(engine, traffic, adapters)


def warm_engine(
    options: Namespace, traffic: list[Arrival], adapters: list[LoRARequest], slots: int | None
) -> LLMEngine:
    longest = options.prompt_max + options.output_max
    cpu_loras = options.cpu_loras or max(options.adapters, slots or 0)
    engine = LLMEngine.from_engine_args(engine_args(options, options.max_num_seqs, longest, slots, cpu_loras))
    warm_up(engine, traffic, adapters)
    if slots != 0:
        for adapter in adapters:
            (engine.remove_lora(adapter.lora_int_id) if options.cold else engine.add_lora(adapter))
    return engine


def measure_on(engine: LLMEngine, traffic: list[Arrival], adapters: list[LoRARequest]) -> dict[str, object]:
    before = counters(engine)
    start, steps = serve(engine, traffic, adapters)
    happened = {name: count - before[name] for name, count in counters(engine).items()}
    return {**serve_summary(start, steps, traffic), **happened, **record(start, steps, traffic)}


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


def serve(engine: LLMEngine, traffic: list[Arrival], adapters: list[LoRARequest]) -> tuple[float, list[Step]]:
    """Queue every request once its time has come, and step; the start (`time.perf_counter`) and the steps."""
    pending = deque(enumerate(traffic))
    start, steps = time.perf_counter(), []
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][1].time_s <= time.perf_counter() - start:
            number, arrival = pending.popleft()
            add(engine, str(number), arrival, adapters)
        if engine.has_unfinished_requests():
            steps.append(run_step(engine))
        else:
            time.sleep(max(0.0, start + pending[0][1].time_s - time.perf_counter()))
    return start, steps


def counters(engine: LLMEngine) -> dict[str, int]:
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


def record(start: float, steps: list[Step], traffic: list[Arrival]) -> dict[str, list[str]]:
    """What came and what was done, for whoever wants to replay it.

    arrivals   seconds after the start, prompt tokens, output tokens, number of the adapter or -1
    steps      seconds after the start, milliseconds it took, requests that got a token
    """
    return {
        "arrivals": [
            f"{a.time_s:.4f} {a.prompt_tokens} {a.output_tokens} {-1 if a.adapter is None else a.adapter}"
            for a in traffic
        ],
        "steps": [f"{s.started - start:.4f} {1e3 * s.seconds:.2f} {len(s.emitted)}" for s in steps],
    }


def quantiles_ms(seconds: list[float]) -> list[float]:
    return (1e3 * np.percentile(seconds, range(101))).tolist()
