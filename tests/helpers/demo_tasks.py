"""The demo model, its four adapters, and prompts of their tasks. Nothing of the engine but the model's folder."""

import random
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("json", "sql", "bullets", "dates")


def demo_base() -> Path:
    from minivllm.models.demo_model import demo_model_path

    return demo_model_path(progress=False)


def adapter_folder(name: str) -> Path:
    return ROOT / "adapters" / name


def task_prompts(per_adapter: int) -> list[tuple[str | None, str]]:
    """(adapter, prompt) in random order: `per_adapter` of every adapter's task for itself, and one of each for base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from adapters.recipe.tasks import examples, prompt

    pairs = [(name, prompt(name, e.text)) for name in NAMES for e in examples(name, per_adapter, seed=7)]
    pairs += [(None, prompt(name, examples(name, 1, seed=8)[0].text)) for name in NAMES]
    random.Random(0).shuffle(pairs)
    return pairs
