"""Switching: requests grouped by adapter, one group after the other, and the same requests as one mixed batch.

Engines that merge an adapter into the base model have to group. Here nobody has to: the mixed batch gives the same
answers in fewer steps, because every step is shared.
"""

from collections import defaultdict

from examples.common import GREEDY, QUESTIONS, adapter, chat, finish, make_engine
from minivllm import LLMEngine

Asked = list[tuple[str, str]]  # (request id, adapter)


def ask(engine: LLMEngine, asked: Asked) -> dict[str, str]:
    for request_id, name in asked:
        engine.add_request(request_id, chat(engine, QUESTIONS[name]), GREEDY, lora_request=adapter(name))
    return {request_id: output.outputs[0].text for request_id, output in finish(engine).items()}


def in_groups(engine: LLMEngine, asked: Asked) -> dict[str, str]:
    """One adapter at a time. The engine makes each group's adapter active by itself (`set_active_loras`)."""
    groups = defaultdict(list)
    for request_id, name in asked:
        groups[name].append((request_id, name))
    answers = {}
    for group in groups.values():
        answers |= ask(engine, group)
    return answers


def main(engine: LLMEngine) -> dict[str, int]:
    asked = [(f"{name}-{number}", name) for number in range(2) for name in ("sql", "dates")]
    steps = {}
    for way in (in_groups, ask):
        before = engine.metrics.steps
        answers = way(engine, asked)
        steps[way.__name__] = engine.metrics.steps - before
    assert answers == in_groups(engine, asked)
    print(f"grouped: {steps['in_groups']} steps; mixed: {steps['ask']} steps; the answers are the same")
    return steps


if __name__ == "__main__":
    main(make_engine())
