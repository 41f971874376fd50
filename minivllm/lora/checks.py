"""What configs and weights may not be, in sentences. Stands for checks all over vllm/lora/ (v0.22.1).

The core asks `check_fields` and `check_config` about a config, the others about weights. Options have their sentences
in their own files.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from minivllm.config import DTYPES, LoRAConfig
from minivllm.errors import shown
from minivllm.lora.patterns import PLAIN_KEY

# ---- configs --------------------------------------------------------------------------------------------------

# Objects in objects. PEFT's go three deep; repr() of a thousand would end in a RecursionError.
CONFIG_DEPTH = 16

# Initialisations that move part of the base weight into the adapter: on an unmoved base they are wrong.
BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Those that leave the base weight as it is. All others are refused: a new one may be of either kind.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

# Further fields that must not be set, and what is said of them.
REFUSED_FIELDS = {
    "layer_replication": "layer_replication, which changes the base model, is not supported; train without it.",
    "alora_invocation_tokens": "aLoRA (alora_invocation_tokens) is not supported; train without it.",
    "use_qalora": "QALoRA (use_qalora) is not supported; train without it.",
    "use_bdlora": "BD-LoRA (use_bdlora) is not supported; train without it.",
    "arrow_config": "Arrow (arrow_config) is not supported; train without it.",
    "kasa_config": "KaSA (kasa_config), which changes the base model, is not supported; train without it.",
    "monteclora_config": "MonteCLoRA (monteclora_config) is not supported; train without it.",
    "trainable_token_indices": "trainable_token_indices {} is not supported; train without it, or bring new tokens "
    "in new_embeddings.safetensors.",
}

# Keys of patterns: one for each linear of a model of 126 layers makes 882. Those that are no plain names are few.
MOST_PATTERNS = 2048
LONGEST_PATTERN = 256
MOST_OTHER_PATTERNS = 32

# Wider than any model. What a file gives goes into float arithmetic, which a JSON int can overflow.
LARGEST_RANK = 2**20


class NeedsOption(ValueError):
    """An adapter that the engine refuses as it was started, and would serve with other options.

    options   fields of `LoRAConfig`, with values that admit it
    """

    def __init__(self, text: str, **options: Any) -> None:
        super().__init__(text)
        self.options = options


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. ValueError for a name that is there twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def check_depth(value: Any, depth: int = CONFIG_DEPTH) -> None:
    """ValueError for lists and objects in each other, more than so many deep."""
    if not isinstance(value, dict | list):
        return
    if not depth:
        raise ValueError(f"it is nested more than {CONFIG_DEPTH} deep")
    for inner in value.values() if isinstance(value, dict) else value:
        check_depth(inner, depth - 1)


def check_fields(config: Mapping[str, Any]) -> None:
    """ValueError names a field, and its value, that is of another type than it must be."""
    for pattern in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config[pattern], dict | None):
            raise ValueError(f"{pattern} must map module names to numbers, got {config[pattern]!r}")
        if config[pattern]:
            _check_keys(pattern, list(config[pattern]))
    of_modules = config["rank_pattern"] or {}
    ranks = {f"rank_pattern: LoRA rank {key}": rank for key, rank in of_modules.items()}
    for name, rank in {"LoRA rank r": config["r"], **ranks}.items():
        if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
            raise ValueError(f"{name} must be an int from 1 to {LARGEST_RANK}, got {shown(rank)}")
    of_modules = config["alpha_pattern"] or {}
    alphas = {f"alpha_pattern: LoRA alpha {key}": alpha for key, alpha in of_modules.items()}
    for name, alpha in {"LoRA alpha lora_alpha": config["lora_alpha"], **alphas}.items():
        if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:  # NaN is not <= anything
            raise ValueError(f"{name} must be a finite number, got {shown(alpha)}")
    if not isinstance(config["use_rslora"], bool | None):
        raise ValueError(f"use_rslora must be true or false, got {shown(config['use_rslora'])}")


def _check_keys(field: str, keys: list[str]) -> None:
    """ValueError names a pattern if it has too many keys, or one that is too long or intricate."""
    if len(keys) > MOST_PATTERNS:
        raise ValueError(f"{field} has {len(keys)} entries, at most {MOST_PATTERNS} are read")
    others = [key for key in keys if not PLAIN_KEY.fullmatch(key)]
    for key in keys:
        if len(key) > LONGEST_PATTERN:
            raise ValueError(
                f"{field} has key '{key[:40]}...' of {len(key)} characters, which is no regular expression that "
                f"is read: at most {LONGEST_PATTERN} characters"
            )
    if len(others) > MOST_OTHER_PATTERNS:
        raise ValueError(
            f"{field} has {len(others)} keys that are no plain names, at most {MOST_OTHER_PATTERNS} are read"
        )


def check_config(peft_helper: Any, lora_config: LoRAConfig) -> None:
    """ValueError that lists everything in an adapter's config (`PEFTHelper`) that the engine will not serve.

    It is a NeedsOption if options of the engine would admit all of that.
    """
    config, problems = peft_helper.config, []  # sentences, and each NeedsOption
    if (peft_type := config.get("peft_type", "LORA")) != "LORA":
        problems.append(f"peft_type {peft_type!r} is not supported, only LORA.")
    if saved := config.get("modules_to_save"):
        problems.append(f"The engine only supports modules_to_save being None, got {saved!r}.")
    if config.get("use_dora"):
        problems.append("The engine does not yet support DoRA; train without use_dora.")
    if (bias := config.get("bias", "none")) != "none":
        problems.append(
            f"Adapter bias cannot be used without bias_enabled, nor with it here: bias {bias!r} changes the "
            "base model that all adapters share; train with bias='none'."
        )
    init = config.get("init_lora_weights")
    lowered = init.lower() if isinstance(init, str) else init
    if isinstance(init, str) and lowered.startswith(BASE_CHANGING_INITIALISATIONS):
        problems.append(
            f"init_lora_weights {init!r} changes the base model that all adapters share; "
            "train with another initialisation, or convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    elif not isinstance(init, bool | str | None) or lowered not in INITIALISATIONS:
        problems.append(
            f"init_lora_weights {init!r} is not known to leave the base model as it is, which "
            "all adapters share; train with true, false, gaussian, eva, orthogonal or mica."
        )
    options = peft_helper.extensions.config_options
    for name in (*options, *REFUSED_FIELDS):
        if (value := config.get(name)) in (None, False):
            continue
        if name in options:
            problems += options[name].check_config(value, peft_helper, lora_config)
        elif value or name == "alora_invocation_tokens":
            problems.append(REFUSED_FIELDS[name].format(shown(value)))
    if (largest := peft_helper.ranks[-1]) > lora_config.max_lora_rank:
        sentence = f"LoRA rank {largest} is greater than max_lora_rank {lora_config.max_lora_rank}; "
        sentence += f"pass --max-lora-rank {largest}."
        problems.append(NeedsOption(sentence, max_lora_rank=largest))
    if not problems:
        return
    text = " ".join(map(str, problems))
    if all(isinstance(problem, NeedsOption) for problem in problems):
        raise NeedsOption(text, **{name: v for problem in problems for name, v in problem.options.items()})
    raise ValueError(text)


# ---- weights --------------------------------------------------------------------------------------------------

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
    """What is said of names that an adapter uses and no module has.   limit: the server's `target_modules`"""
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
