"""Profiling: what adapters add to a step. The same prompts by the base model and by adapters, in turns.

Medians of steps, since a machine has other work; `minivllm bench cpu` does it at length, and beside PEFT.
"""

from statistics import median
from time import perf_counter

from examples.common import QUESTIONS, adapter, chat, make_engine
from minivllm import LLMEngine, SamplingParams

TOKENS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def step_seconds(engine: LLMEngine, names: list[str | None]) -> list[float]:
    """Seconds of each step that decodes one token for each of these adapters."""
    for number, name in enumerate(names):
        prompt = chat(engine, QUESTIONS["sql"])
        engine.add_request(str(number), prompt, TOKENS, lora_request=adapter(name) if name else None)
    engine.step()  # the prompts, and copies of adapters into slots
    seconds = []
    while engine.has_unfinished_requests():
        started = perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
    return seconds


def main(engine: LLMEngine, rounds: int = 3) -> dict[str, float]:
    batches = {"base": [None] * 4, "adapters": ["sql", "dates"] * 2}
    for names in batches.values():
        step_seconds(engine, names)  # the first time reads adapters
    seconds = {kind: [] for kind in batches}
    for _ in range(rounds):
        for kind, names in batches.items():
            seconds[kind] += step_seconds(engine, names)
    of = {kind: median(found) for kind, found in seconds.items()}
    of["overhead"] = of["adapters"] / of["base"] - 1
    print(
        f"four requests: base {1000 * of['base']:.1f} ms a step, two adapters {1000 * of['adapters']:.1f} ms"
    )
    print(f"overhead: {of['overhead']:.0%}")
    return of


if __name__ == "__main__":
    main(make_engine())
