"""An engine that is made, and stepped by itself, wherever it is: in this process or in one of its own."""

import time
from collections.abc import Sequence

from benchmarks.stand_in import take_time
from minivllm.assembly import LLMEngine
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


def make_engine(args: EngineArgs, step_ms: int | None) -> LLMEngine:
    """step_ms: stand in for a GPU whose steps take so long"""
    engine = LLMEngine.from_engine_args(args)
    if step_ms is not None:
        take_time(engine, 1e-3 * step_ms)
    return engine


def run_direct(
    engine: LLMEngine, token_ids: Sequence[list[int]], adapters: Sequence[LoRARequest], max_tokens: int
) -> tuple[int, float, list[float], float]:
    """All requests at once, stepped by whoever calls: tokens, seconds, those to each first token, and of the CPU."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    num_tokens, started, cpu = 0, time.perf_counter(), time.process_time()
    for number, ids in enumerate(token_ids):
        lora = adapters[number % len(adapters)] if adapters else None
        engine.add_request(f"direct-{number}", ids, params, lora_request=lora)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now - started)
            num_tokens += len(output.outputs[0].delta_token_ids)
    seconds = time.perf_counter() - started
    return num_tokens, seconds, list(first.values()), time.process_time() - cpu


def cpu_seconds(engine: LLMEngine) -> float:
    """Of the process that has the engine."""
    return time.process_time()
