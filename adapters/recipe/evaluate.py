"""Score the adapters: `python -m adapters.recipe.evaluate base|peft|engine ..`

The score is exact match on 100 held-out inputs. `base` is the base model with one sentence of instruction, `peft`
transformers + PEFT with one adapter at a time, `engine` minivllm with all four in one mixed batch. Adapters are
taken as stored, in bfloat16; computation is in float32, decoding greedy.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from adapters.recipe.tasks import TASKS, examples, is_right, prompt
from minivllm.models.demo_model import demo_model_path

ADAPTERS = Path(__file__).resolve().parents[1]
SCORES = ADAPTERS / "recipe" / "scores.json"
NUM_EXAMPLES = 100
MAX_TOKENS = 64
Outputs = dict[str, list[str]]


def evaluate_base(tasks: tuple[str, ...]) -> Outputs:
    """What the base model answers when it is told the task in a sentence."""
    return _with_transformers(tasks, adapted=False)


def evaluate_peft(tasks: tuple[str, ...]) -> Outputs:
    """What transformers + PEFT answer with each task's own adapter."""
    return _with_transformers(tasks, adapted=True)


def evaluate_engine(tasks: tuple[str, ...]) -> Outputs:
    """What minivllm answers when the inputs of all tasks take turns in one batch."""
    from minivllm import LLM, LoRARequest, SamplingParams

    llm = LLM(str(demo_model_path()), enable_lora=True, max_loras=len(tasks), max_lora_rank=32)
    loras = {task: LoRARequest(task, i, str(ADAPTERS / task)) for i, task in enumerate(tasks, 1)}
    mixed = [(task, text) for texts in zip(*map(held_out_prompts, tasks)) for task, text in zip(tasks, texts)]
    results = llm.generate(
        [text for _, text in mixed],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        lora_request=[loras[task] for task, _ in mixed],
    )
    outputs: Outputs = {task: [] for task in tasks}
    for (task, _), result in zip(mixed, results):
        outputs[task].append(result.outputs[0].text)
    return outputs


def held_out_prompts(task: str, instructed: bool = False) -> list[str]:
    """The prompts every way of answering is scored on."""
    return [prompt(task, example.text, instructed) for example in examples(task, NUM_EXAMPLES)]


def _with_transformers(tasks: tuple[str, ...], adapted: bool, batch_size: int = 25) -> Outputs:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), padding_side="left")
    outputs: Outputs = {}
    for task in tasks:
        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
        if adapted:
            model = PeftModel.from_pretrained(model, ADAPTERS / task)
        model.eval()
        outputs[task] = []
        prompts = held_out_prompts(task, instructed=not adapted)
        for start in range(0, len(prompts), batch_size):
            inputs = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
            with torch.inference_mode():
                ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
            answers = ids[:, inputs.input_ids.shape[1] :]  # (batch, new tokens)
            outputs[task] += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return outputs


def score(task: str, outputs: list[str], misses: int = 0) -> float:
    """The share of right answers; the first few wrong ones are printed."""
    answers = [(example, output) for example, output in zip(examples(task, NUM_EXAMPLES), outputs)]
    wrong = [(example, output) for example, output in answers if not is_right(output, example.answer)]
    for example, output in wrong[:misses]:
        print(f"{task}: {example.text}\n  expected {example.answer!r}\n  got      {output!r}")
    return 1 - len(wrong) / len(answers)


WAYS: dict[str, Callable[[tuple[str, ...]], Outputs]] = {
    "base": evaluate_base,
    "peft": evaluate_peft,
    "engine": evaluate_engine,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--misses", type=int, default=3, help="how many wrong answers to print for each task")
    args = parser.parse_args()
    scores = json.loads(SCORES.read_text()) if SCORES.exists() else {}
    for way in args.ways:
        for task, outputs in WAYS[way](tuple(args.tasks)).items():
            scores.setdefault(task, {})[way] = score(task, outputs, args.misses)
            print(f"{way} {task}: {scores[task][way]:.0%}")
    SCORES.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
