"""transformers + PEFT on a model with several adapters, one at a time. Nothing of minivllm is used here."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from tiny_adapters import load_oracle
from tiny_models import all_in_float64

Result = TypeVar("Result")


class Oracle:
    """Answers alone, with one adapter, what a mixed batch must answer too.

    dtype: float64 computes norms in float64 too, which transformers does in float32.
    options: more for from_pretrained, such as quantization_config
    """

    def __init__(self, base: Path, dtype: torch.dtype = torch.float64, **options: object) -> None:
        self.base = load_oracle(base, dtype=dtype, **options)
        if dtype == torch.float64:
            all_in_float64(self.base)
        self.dtype = dtype
        self.peft = None
        self.known: set[str] = set()

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter folder under a name of its own."""
        from peft import PeftModel

        if self.peft is None:
            self.peft = PeftModel.from_pretrained(self.base, folder, adapter_name=name)
        else:
            self.peft.load_adapter(folder, adapter_name=name)
        self.peft.to(self.dtype).eval()
        self.known.add(name)

    def forget(self, name: str) -> None:
        self.peft.delete_adapter(name)
        self.known.remove(name)

    @torch.inference_mode()
    def call(self, name: str | None, function: Callable[[torch.nn.Module], Result]) -> Result:
        """function(the model with that adapter), None = base. To choose an adapter takes as long as a step."""
        if self.peft is None:
            return function(self.base)
        if name is None:
            with self.peft.disable_adapter():
                return function(self.peft)
        self.peft.set_adapter(name)
        return function(self.peft)

    def logits(self, name: str | None, token_ids: list[list[int]]) -> torch.Tensor:
        """Of texts of one adapter (None = base), padded on the right: (texts, longest, V)"""
        longest = max(map(len, token_ids))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in token_ids])
        return self.call(name, lambda model: model(padded).logits)

    def greedy(self, name: str | None, prompt: list[int], max_tokens: int) -> list[int]:
        """What is likeliest, token by token, with no end but the length."""

        def generate(model: torch.nn.Module) -> list[int]:
            ids = list(prompt)
            for _ in range(max_tokens):
                logits = model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            return ids[len(prompt) :]

        return self.call(name, generate)
