"""What PEFT and transformers have answered, read from `tests/recorded`: exercises are checked without importing them.

`tests/tools/recordings.py` makes these files, and `make nightly` makes them anew and compares.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.worlds.engines import TinyWorld

FOLDER = Path(__file__).parents[1] / "recorded"
WORLD, MERGED = "world", "merged"
VARIANT = "qwen2-tied"  # its positions need nothing of transformers


class RecordedOracle:
    """Answers what it has been asked before, token by token as `oracles.peft.Oracle` did."""

    def __init__(self, path: Path) -> None:
        answers = json.loads(path.read_text(encoding="utf-8"))
        self.answers = {(a["adapter"], tuple(a["prompt"])): a["tokens"] for a in answers}

    def greedy(self, name: str | None, prompt: list[int], max_tokens: int) -> list[int]:
        """The first tokens of the answer. LookupError for a question that nobody has put to PEFT."""
        answer = self.answers.get((name, tuple(prompt)), [])
        if len(answer) < max_tokens:
            raise LookupError(
                f"PEFT's answer of {max_tokens} tokens with adapter {name} to {prompt} is not recorded; "
                "add the prompt to tests/tools/recordings.py and run it"
            )
        return answer[:max_tokens]


class RecordedWorld(TinyWorld):
    """A base model's folder and those of four adapters, as `TinyWorld` makes them, and PEFT's answers."""

    def __init__(self, folder: Path = FOLDER / WORLD) -> None:
        super().__init__(folder, VARIANT)
        self.answers = RecordedOracle(folder / "answers.json")

    def oracle(self, dtype: torch.dtype = torch.float64) -> RecordedOracle:
        return self.answers


def merged_by_peft(folder: Path) -> dict[str, torch.Tensor]:
    """Module name -> (N, K) float64, what PEFT adds to its weight with the adapter in `folder`."""
    return load_file(folder / "merged.safetensors")
