"""The model, the adapters and the questions of all examples, and a loop that steps an engine to its end."""

from pathlib import Path

from minivllm import EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from minivllm.models.demo_model import demo_model_path

ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"

# One question for each adapter, as its training data has them.
QUESTIONS = {
    "json": "Good news, Lucas Lindberg just confirmed the deal: 76 bottles of ink, 45.97 dollars for each piece!",
    "sql": "What mean age do employees paid more than 83000 and older than 61 years have?",
    "bullets": "When the lights came back on, 5 globes, ten zippers and nine vases had vanished from the stage.",
    "dates": "Nobody expected the boot camp, which kicked off on Aug 20 2026, to go on till Oct 11 2026.",
}
NAMES = tuple(QUESTIONS)
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def adapter(name: str) -> LoRARequest:
    """The request that names one of the demo adapters, by an id of its own."""
    return LoRARequest(lora_name=name, lora_int_id=NAMES.index(name) + 1, lora_path=str(ADAPTERS / name))


def make_engine(**options: object) -> LLMEngine:
    """An engine of the demo model with room for all four adapters in memory and two in a batch."""
    defaults = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 32}
    return LLMEngine.from_engine_args(
        EngineArgs(demo_model_path(), max_model_len=512, **{**defaults, **options})
    )


def chat(engine: LLMEngine, question: str) -> str:
    """A question as the model's chat template has it."""
    turns = [{"role": "user", "content": question}]
    return engine.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until no request is left; the last output of each, by its id."""
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def answer_all(engine: LLMEngine, names: list[str | None]) -> list[str]:
    """Ask each adapter its question, None the base model, all in one batch; the answers in the same order."""
    for number, name in enumerate(names):
        prompt = chat(engine, QUESTIONS[name or "sql"])
        engine.add_request(str(number), prompt, GREEDY, lora_request=adapter(name) if name else None)
    outputs = finish(engine)
    return [outputs[str(number)].outputs[0].text for number in range(len(names))]
