"""What an adapter_config.json must not say. Stands for the refusals of vllm/lora/peft_helper.py (v0.22.1)."""

import sys
from typing import TYPE_CHECKING, Any

from minivllm.lora.limits import MOST_TARGET_PARAMETERS
from minivllm.validation import is_integral, is_list_of_names, is_real, shown

if TYPE_CHECKING:
    from minivllm.lora.peft_helper import PEFTHelper

# Initialisations that move part of the base weight into the adapter: on an unmoved base they are wrong.
BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Those that leave the base weight as it is. All others are refused: a new one may be of either kind.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

# Ends of the parameters that may be adapted in the place of a module: of experts, and of what is a linear here.
TARGET_PARAMETERS = ("gate_up_proj", "down_proj", "weight")

# Wider than any model. What a file gives goes into float arithmetic, which a JSON int can overflow.
LARGEST_RANK = 2**20


def refuse_wrong_types(helper: "PEFTHelper") -> None:
    """ValueError names a field, and its value, that is of another type than it must be, or too long."""
    for name, rank in _entries("r", helper.r, "rank_pattern", helper.rank_pattern):
        if not is_integral(rank) or not 1 <= rank <= LARGEST_RANK:
            raise ValueError(f"{name} must be an int from 1 to {LARGEST_RANK}, got {shown(rank)}")
    for name, alpha in _entries("lora_alpha", helper.lora_alpha, "alpha_pattern", helper.alpha_pattern):
        if not is_real(alpha) or not abs(alpha) <= sys.float_info.max:  # NaN is not <= anything
            raise ValueError(f"{name} must be a finite number, got {shown(alpha)}")
    if not isinstance(helper.use_rslora, bool | None):
        raise ValueError(f"use_rslora must be true or false, got {shown(helper.use_rslora)}")
    parameters = helper.target_parameters
    if parameters is not None and not is_list_of_names(parameters):
        raise ValueError(f"target_parameters must be a list of names, got {shown(parameters)}")
    if len(parameters or []) > MOST_TARGET_PARAMETERS:
        raise ValueError(
            f"target_parameters has {len(parameters)} entries, at most {MOST_TARGET_PARAMETERS} are read"
        )


def _entries(field: str, value: Any, pattern_field: str, pattern: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name for error messages, value) of a field and of each entry of its pattern."""
    kind = "rank" if field == "r" else "alpha"
    entries = [(f"{pattern_field}: LoRA {kind} {key}", entry) for key, entry in pattern.items()]
    return [(f"LoRA {kind} {field}", value), *entries]


def refusals_of(helper: "PEFTHelper") -> list[tuple[Any, str]]:
    """(whether it applies, what we say) for each thing that PEFT can do and this engine cannot."""
    init = helper.init_lora_weights
    init = init.lower() if isinstance(init, str) else init
    changes_base = isinstance(init, str) and init.startswith(BASE_CHANGING_INITIALISATIONS)
    is_known = isinstance(init, bool | str | None) and init in INITIALISATIONS
    parameters = [p for p in helper.target_parameters or [] if p.rpartition(".")[2] not in TARGET_PARAMETERS]
    others = {
        "layer_replication, which changes the base model,": helper.layer_replication,
        "aLoRA (alora_invocation_tokens)": helper.alora_invocation_tokens is not None,
        "QALoRA (use_qalora)": helper.use_qalora,
        "BD-LoRA (use_bdlora)": helper.use_bdlora,
        "Arrow (arrow_config)": helper.arrow_config,
        "KaSA (kasa_config), which changes the base model,": helper.kasa_config,
        "MonteCLoRA (monteclora_config)": helper.monteclora_config,
    }
    return [
        (helper.peft_type != "LORA", f"peft_type {helper.peft_type!r} is not supported, only LORA."),
        (
            helper.modules_to_save,
            f"The engine only supports modules_to_save being None, got {helper.modules_to_save!r}.",
        ),
        (helper.use_dora, "The engine does not yet support DoRA; train without use_dora."),
        (
            helper.bias != "none",
            f"Adapter bias cannot be used without bias_enabled, nor with it here: bias {helper.bias!r} changes the "
            "base model that all adapters share; train with bias='none'.",
        ),
        (
            changes_base,
            f"init_lora_weights {helper.init_lora_weights!r} changes the base model that all adapters share; "
            "train with another initialisation, or convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...).",
        ),
        (
            not changes_base and not is_known,
            f"init_lora_weights {helper.init_lora_weights!r} is not known to leave the base model as it is, which "
            "all adapters share; train with true, false, gaussian, eva, orthogonal or mica.",
        ),
        (
            helper.trainable_token_indices,
            f"trainable_token_indices {helper.trainable_token_indices!r} is not supported; train without it, or "
            "bring new tokens in new_embeddings.safetensors.",
        ),
        (
            parameters,
            f"target_parameters {parameters!r} are not supported, only gate_up_proj and down_proj of experts, and "
            "weights of linears.",
        ),
        *((used, f"{what} is not supported; train without it.") for what, used in others.items()),
    ]
