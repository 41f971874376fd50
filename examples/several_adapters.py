"""Several adapters: load them ahead, serve all of them and the base model in one batch, unload one."""

from examples.common import NAMES, adapter, answer_all, make_engine
from minivllm import LLMEngine


def main(engine: LLMEngine) -> dict[str, str]:
    """Two slots serve four adapters: two at a time share each step, beside the base model."""
    for name in NAMES:
        engine.model_runner.add_lora(adapter(name))
    print("in memory:", sorted(engine.model_runner.list_loras()))

    answers = dict(zip([*NAMES, "base"], answer_all(engine, [*NAMES, None])))
    for name, answer in answers.items():
        print(f"{name}: {answer!r}")
    summary = engine.trace.summary()
    print(f"{summary['mixed_steps']} of {summary['steps']} steps computed more than one adapter")

    engine.model_runner.remove_lora(lora_id=1)
    print("after unloading one:", sorted(engine.model_runner.list_loras()))
    return answers


if __name__ == "__main__":
    main(make_engine())
