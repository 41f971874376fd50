"""What the weights of an adapter may not be, in sentences. Stands for checks all over vllm/lora/ (v0.22.1).

What its config may not be is said in peft_helper.py, and options have their sentences in their own files.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch

from minivllm.config import DTYPES


class NeedsOption(ValueError):
    """An adapter that the engine refuses as it was started, and would serve with other options.

    options   fields of `LoRAConfig`, with values that admit it
    """

    def __init__(self, text: str, **options: Any) -> None:
        super().__init__(text)
        self.options = options


# What else may be in an adapter's weights file, by the end of the name, and how it came there.
UNSUPPORTED_WEIGHTS = {
    ".lora_magnitude_vector": "it belongs to DoRA; train without use_dora",
    ".lora_B.bias": "a bias on B, but adapter_config.json says lora_bias=False",
    ".trainable_tokens_delta": "trained tokens; train without trainable_token_indices",
    ".embed_tokens.weight": "a whole embedding; save the adapter with save_embedding_layers=False",
    ".lm_head.weight": "a whole output embedding; save the adapter with save_embedding_layers=False",
    ".bias": "a bias of the base model, which all adapters share; train with bias='none'",
}

# To compare two names takes 50 µs, and a model of experts has 70,000.
MOST_COMPARED = 400
LONGEST_COMPARED = 120


def unsupported(name: str) -> str:
    """What is said of a tensor that is neither A nor B."""
    known = (why for end, why in UNSUPPORTED_WEIGHTS.items() if f".{name}".endswith(end))
    why = next(known, "only lora_A, lora_B, lora_embedding_A and lora_embedding_B are read")
    return f"{name} is unsupported LoRA weight: {why}"


def check_tensor(name: str, tensor: torch.Tensor, vocab_size: int | None) -> None:
    """ValueError unless it is a matrix of floats. An embedding's A has the vocabulary's width, None = any."""
    shape = tuple(tensor.shape)
    if tensor.ndim != 2 or 0 in shape:
        raise ValueError(f"{name} must be a matrix of at least rank 1, got shape {shape}")
    if tensor.dtype not in DTYPES.values():
        names = sorted({str(dtype).removeprefix("torch.") for dtype in DTYPES.values()})
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(names)}")
    if name.endswith(".lora_embedding_A") and vocab_size not in (None, shape[1]):
        raise ValueError(f"{name} has shape {shape}, but the model's vocabulary has {vocab_size} tokens")


def check_pair(module: str, found: dict[str, torch.Tensor], ranks: list[int]) -> None:
    """ValueError unless a module has A and B that fit together, of a rank that the config gives.

    found   "lora_A", "lora_B" and what options read beside B, such as "bias" (1, N)
    """
    a, b = found.get("lora_A"), found.get("lora_B")
    if a is None or b is None:
        missing = [side for side in ("lora_A", "lora_B") if side not in found]
        there = " and ".join(sorted(map(_in_files, found)))
        raise ValueError(f"{module} has {there} but not {' and '.join(missing)}")
    (*experts, rank, _), (*experts_of_b, height, rank_of_b) = a.shape, b.shape
    if (experts, rank) != (experts_of_b, rank_of_b):
        raise ValueError(
            f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} differ in rank"
            + (" or in experts" if experts else "")
        )
    if rank not in ranks:
        raise ValueError(
            f"{module} has rank {rank}, but adapter_config.json gives only {ranks} (r and rank_pattern), "
            "so its scaling is unknown"
        )
    for name in found.keys() - {"lora_A", "lora_B"}:
        if (width := found[name].shape[-1]) != height:
            raise ValueError(f"{module} has {_in_files(name)} ({width},), expected ({height},)")


def _in_files(side: str) -> str:
    """What files call A, B and what is beside B."""
    return side if side.startswith("lora_") else f"lora_B.{side}"


def check_numbers(
    module: str, found: dict[str, torch.Tensor], scaling: float, dtype: torch.dtype | None
) -> None:
    """ValueError for NaN or Inf, also for what becomes Inf in this dtype (None: its own) or once scaled.

    found   as in `check_pair`; the scaling is for all but A
    """
    for name, tensor in found.items():
        factor = 1 if name == "lora_A" else scaling
        wanted = dtype or tensor.dtype
        # One pass; NaN comes through both ends, and is not <= anything. No number between is larger once rounded.
        ends = torch.aminmax(tensor)
        smallest, largest = (end.item() if end.dtype == wanted else end.to(wanted).item() for end in ends)
        if not max(-smallest, largest) * abs(factor) <= torch.finfo(wanted).max:
            raise ValueError(f"{module}.{_in_files(name)} holds NaN or Inf as {wanted}")


def check_modules(modules: Iterable[str], expected: list[str]) -> None:
    """ValueError lists modules that are, and end in, no expected name: another model's adapter must not load."""
    ends, depths = frozenset(expected), {end.count(".") + 1 for end in expected}
    unexpected = sorted(
        name for name in modules if not any(".".join(name.split(".")[-n:]) in ends for n in depths)
    )
    if unexpected:
        more = f" and {len(unexpected) - 8} more" if len(unexpected) > 8 else ""
        raise ValueError(
            f"expected target modules in {expected} but received {', '.join(unexpected[:8])}{more}. "
            "Please verify that the loaded LoRA module is correct"
        )


def unmatched(unknown: list[str], targets: list[str], limit: list[str] | None) -> str:
    """What is said of names that an adapter uses and no module has.

    targets   all names that adapters may use, among which the nearest are looked for
    limit     the server's `target_modules`
    """
    shown = []
    for name in unknown[:4]:
        near = nearest_names(name, targets)
        shown.append(f"'{name}'" + (f" (nearest: {', '.join(near)})" if near else ""))
    more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
    why = f"; the engine wraps only target_modules={limit}" if limit else ""
    return f"adapter targets modules that the model does not offer: {', '.join(shown)}{more}{why}"


def nearest_names(name: str, known: list[str], count: int = 2) -> list[str]:
    """The known names that look most like `name`, for an error message: of many, those with the same numbers."""
    numbers = re.findall(r"\d+", name[:LONGEST_COMPARED])
    alike = (
        [other for other in known if re.findall(r"\d+", other) == numbers]
        if len(known) > MOST_COMPARED
        else []
    )
    compared = list(dict.fromkeys([*alike, *known]))[:MOST_COMPARED]
    return get_close_matches(name[:LONGEST_COMPARED], compared, n=count, cutoff=0.4)
