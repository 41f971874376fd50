"""Write adapters/README.md and a card for each adapter: `python -m adapters.recipe.cards`."""

import json
import textwrap
from pathlib import Path

from adapters.recipe.evaluate import ADAPTERS, NUM_EXAMPLES, SCORES
from adapters.recipe.tasks import INSTRUCTIONS, TASKS, Example, examples

ABOUT = {
    "json": "An order in a sentence becomes one line of JSON: who, how many, at which price.",
    "sql": "A question about employees or products becomes one SQL query on two tables that the adapter knows: "
    "`employees(name, city, age, salary)` and `products(name, category, price, stock)`.",
    "bullets": "A sentence that lists things becomes strict bullets, one a line: the thing and how many of it.",
    "dates": "A sentence with a period, its dates written in one of five ways, becomes an ISO 8601 interval.",
}


def table(scores: dict[str, dict[str, float]]) -> str:
    """The adapters side by side."""
    lines = [
        "| adapter | rank | scaling | targets | size | base + instruction | PEFT alone | minivllm, mixed batch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        config = _config(task)
        cells = [
            f"[{task}]({task}/README.md)",
            _rank(config),
            _scaling(config),
            _targets(config),
            _size(task),
        ]
        cells += [_percent(scores[task].get(way)) for way in ("base", "peft", "engine")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def overview(scores: dict[str, dict[str, float]]) -> str:
    """The text of adapters/README.md."""
    return f"""# Four adapters for the demo model

LoRA adapters for SmolLM2-135M-Instruct, trained with PEFT and saved as ordinary PEFT folders in bfloat16. They do
four different things that an exact match can score, and differ where a multi-LoRA engine may trip: rank, scaling,
target modules, patterns.

{table(scores)}

Scores are exact matches on {NUM_EXAMPLES} held-out inputs each, greedy, computed in float32. Held-out sentences are
built from frames and values that training never sees; only small closed classes (months, number words, how many
rows) are shared. The base model is asked with one sentence of instruction more, the adapters with the bare text. For
the last column the inputs of all four tasks take turns in one batch, each with its own adapter.

The prompt is the model's chat template with the text as the user's message (`tasks.prompt`). The model is the one
that `minivllm.models.demo_model` makes from its 4-bit GGUF file, and the adapters are trained on that.

    python -m adapters.recipe.train --device cuda         # all four; a CPU will do, slowly
    python -m adapters.recipe.evaluate base peft engine   # writes recipe/scores.json
    python -m adapters.recipe.cards                       # writes this page and the cards
"""


def card(task: str, scores: dict[str, float]) -> str:
    """The text of an adapter's own README.md."""
    from adapters.recipe.train import RECIPES

    config, recipe = _config(task), RECIPES[task]
    patterns = "".join(
        f"| {name} | `{json.dumps(config[name])}` |\n"
        for name in ("rank_pattern", "alpha_pattern")
        if config[name]
    )
    return f"""---
base_model: {config["base_model_name_or_path"]}
library_name: peft
license: apache-2.0
---
# {task}

{textwrap.fill(ABOUT[task], 110)}

The prompt is the model's chat template with the bare text as the user's message. Two held-out inputs and their
answers:

{chr(10).join(_show(example) for example in examples(task, 2))}

| | |
|---|---|
| rank | {_rank(config)} |
| scaling | {_scaling(config)} |
| targets | {_targets(config)} |
{patterns}| weights | bfloat16, {_size(task)} |
| data | sentences made by `recipe/tasks.py`, seed {recipe.seed} |
| training | {recipe.steps} steps of {recipe.batch} sentences, AdamW, learning rate {recipe.learning_rate:g} (cosine) |
| trained on | one NVIDIA H100, torch 2.11, peft 0.21.0 |
| held-out score | {_percent(scores.get("peft"))} exact match with PEFT on {NUM_EXAMPLES} inputs |
| base model's score | {_percent(scores.get("base"))}, told: "{INSTRUCTIONS[task]}" |
"""


def _show(example: Example) -> str:
    return textwrap.indent(f"{example.text}\n-> " + example.answer.replace("\n", "\n   ") + "\n", "    ")


def _config(task: str) -> dict:
    return json.loads((ADAPTERS / task / "adapter_config.json").read_text())


def _rank(config: dict) -> str:
    others = sorted(set(config["rank_pattern"].values()))
    return f"{config['r']}" + (f" (patterns: {', '.join(map(str, others))})" if others else "")


def _scaling(config: dict) -> str:
    formula = (
        f"{config['lora_alpha']}/√{config['r']}, rsLoRA"
        if config["use_rslora"]
        else f"{config['lora_alpha']}/{config['r']}"
    )
    return formula + (" (and patterns)" if config["alpha_pattern"] else "")


def _targets(config: dict) -> str:
    targets = {target.removesuffix("_proj") for target in config["target_modules"]}
    return ", ".join(name for name in ("q", "k", "v", "o", "gate", "up", "down") if name in targets)


def _size(task: str) -> str:
    return f"{(ADAPTERS / task / 'adapter_model.safetensors').stat().st_size / 1e6:.1f} MB"


def _percent(value: float | None) -> str:
    return "pending" if value is None else f"{value:.0%}"


def main() -> None:
    scores = json.loads(SCORES.read_text())
    pages: dict[Path, str] = {ADAPTERS / task / "README.md": card(task, scores[task]) for task in TASKS}
    pages[ADAPTERS / "README.md"] = overview(scores)
    for path, text in pages.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
