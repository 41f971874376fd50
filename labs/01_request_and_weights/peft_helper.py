"""What adapter_config.json says, and what we refuse. Stands for vllm/lora/peft_helper.py (v0.22.1)."""

from minivllm.labs import Todo
import math
import os
import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from minivllm.config import LoRAConfig
from minivllm.lora.limits import read_config
from minivllm.lora.names import dotted_ends
from minivllm.lora.patterns import TimedPatterns
from minivllm.lora.refusals import refusals_of, refuse_wrong_types

# Longer than any model. What a file gives goes into float arithmetic, which a JSON int can overflow.
LONGEST_CONTEXT = 2**32


@dataclass
class PEFTHelper:
    """An adapter's `adapter_config.json`: the fields that change what is computed. vLLM: `PEFTHelper`.

    Unlike vLLM 0.22.1, `rank_pattern` and `alpha_pattern` are honoured: scaling is a matter of the module, so it
    is asked for by `scaling(module_name, rank)`, the one place that computes it. `vllm_lora_scaling_factor` is
    the scaling of a module that no pattern names.

    `vllm_long_context_scaling_factor` is the linear rotary factor of an adapter trained at a `context_length` beyond
    the base model's positions, ceil(context_length / vllm_max_position_embeddings); 1 for all others.

    `target_modules` is kept for people to read; which modules an adapter has is told by its tensors.

    Raises ValueError naming the field when a rank, alpha or pattern is not what its type says. What we know but
    do not serve is refused later, by `validate_legal`.
    """

    r: int
    lora_alpha: float
    target_modules: list[str] | str | None

    bias: str = "none"
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    peft_type: str = "LORA"
    init_lora_weights: bool | str | None = True
    lora_bias: bool = False
    layer_replication: list | None = None
    trainable_token_indices: list | dict | None = None
    alora_invocation_tokens: list[int] | None = None
    target_parameters: list[str] | None = None
    use_qalora: bool = False
    use_bdlora: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    monteclora_config: Any = None
    context_length: int | None = None
    vllm_lora_scaling_factor: float = 1.0
    vllm_max_position_embeddings: int | None = None
    vllm_long_context_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        self._patterns = TimedPatterns()
        self.rank_pattern = self._checked_pattern("rank_pattern")
        self.alpha_pattern = self._checked_pattern("alpha_pattern")
        refuse_wrong_types(self)
        self._target_parameters = frozenset(self.target_parameters or ())
        self.vllm_lora_scaling_factor = self._scale(self.lora_alpha, self.r)
        self.vllm_long_context_scaling_factor = self._long_context_scaling_factor()

    def _long_context_scaling_factor(self) -> float:
        """By how much an adapter trained at `context_length` stretches the base model's positions."""
        length, base = self.context_length or 0, self.vllm_max_position_embeddings
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= LONGEST_CONTEXT:
            raise ValueError(f"context_length must be an int from 1 to {LONGEST_CONTEXT}, got {length!r}")
        return float(max(1, math.ceil(length / base))) if length and base else 1.0

    def _checked_pattern(self, name: str) -> dict[str, Any]:
        """The pattern, {} for None. ValueError unless it is a dict whose keys are regular expressions."""
        pattern = getattr(self, name)
        if pattern is None:
            return {}
        if not isinstance(pattern, dict):
            raise ValueError(f"{name} must map module names to numbers, got {pattern!r}")
        self._patterns.admit(name, pattern)
        for key in pattern:
            try:
                self._matches(key, "")
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"{name} has key '{key}', which is no regular expression: {error}"
                ) from error
        return pattern

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "PEFTHelper":
        """From the parsed JSON; fields that no LoRA server needs are passed over. ValueError: a field missing."""
        known = {f.name for f in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        if missing := required - config.keys():
            raise ValueError(f"Missing required configuration fields: {', '.join(sorted(missing))}")
        return cls(**{name: value for name, value in config.items() if name in known})

    @classmethod
    def from_local_dir(cls, lora_path: str, max_position_embeddings: int | None = None) -> "PEFTHelper":
        """From a folder. FileNotFoundError: no folder or no config. ValueError: not JSON, or not LoRA."""
        if not os.path.isdir(lora_path):
            raise FileNotFoundError(f"adapter folder '{lora_path}' does not exist")
        path = os.path.join(lora_path, "adapter_config.json")
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"'{lora_path}' has no adapter_config.json, so it is not an adapter folder"
            )
        try:
            config = read_config(path)
        except OSError as error:
            raise ValueError(f"'{path}' cannot be read: {error.strerror or error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"'{path}' holds a {type(config).__name__}, expected a JSON object")
        # Another kind of adapter (IA3, prompt tuning) lacks LoRA's fields: name the kind, not the fields.
        if config.get("peft_type", "LORA") != "LORA":
            raise ValueError(f"'{path}' has peft_type {config['peft_type']!r}; only LORA is supported")
        config["vllm_max_position_embeddings"] = max_position_embeddings
        try:
            return cls.from_dict(config)
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error

    # region lab 1.3: scaling of one module
    def scaling(self, module_name: str, rank: int) -> float:
        """The factor on B·A of one module.

        module_name   as Hugging Face names it, e.g. `model.layers.0.self_attn.q_proj`
        rank          of the module's own tensors, which a `rank_pattern` may have set

        alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732), alpha being the module's.
        """
        raise Todo("lab 1.3: scaling of one module")

    def alpha(self, module_name: str) -> float:
        """The alpha of one module: the first in `alpha_pattern` whose key matches, else `lora_alpha`."""
        raise Todo("lab 1.3: scaling of one module")

    def _scale(self, alpha: float, rank: int) -> float:
        """The rule alone, for any alpha and rank; `use_rslora` says which of the two it is."""
        raise Todo("lab 1.3: scaling of one module")

    def _matches(self, key: str, module_name: str) -> bool:
        """PEFT's rule for the keys of patterns: the key is a regular expression for the end of the name.

        It must begin where a part of the name begins: `q_proj` matches `layers.0.self_attn.q_proj`, `proj` does
        not. `self._patterns.match(expression, name)` says whether `re.match` would find something, in limited time.
        re.error for a key that is no regular expression, ValueError for one that takes too long.
        """
        raise Todo("lab 1.3: scaling of one module")

    # endregion

    def rank(self, name: str) -> int:
        """The rank that the config gives a module or parameter: the first in `rank_pattern` that matches, else r."""
        matching = (rank for key, rank in self.rank_pattern.items() if self._matches(key, name))
        return next(matching, self.r)

    def is_target_parameter(self, name: str) -> bool:
        """Whether `target_parameters` has a parameter's name or an end of it. PEFT's rule, which is not `_matches`."""
        targets = self._target_parameters
        return bool(targets) and not targets.isdisjoint(dotted_ends(name))

    def name_in_patterns(self, module_name: str) -> str:
        """What PEFT asks the patterns by: the module's name, or its weight's if `target_parameters` has that."""
        weight = f"{module_name}.weight"
        return weight if self.is_target_parameter(weight) else module_name

    @cached_property
    def ranks(self) -> list[int]:
        """Every rank that a module of this adapter may have, in order."""
        return sorted({self.r, *self.rank_pattern.values()})

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """ValueError that lists everything in this adapter that the engine will not serve. vLLM: the same name."""
        problems = [text for refused, text in refusals_of(self) if refused]
        if self.ranks[-1] > lora_config.max_lora_rank:
            problems.append(
                f"LoRA rank {self.ranks[-1]} is greater than max_lora_rank {lora_config.max_lora_rank}; "
                f"pass --max-lora-rank {self.ranks[-1]}."
            )
        factor, factors = self.vllm_long_context_scaling_factor, lora_config.long_lora_scaling_factors or ()
        if factor > 1 and factor not in factors:
            problems.append(
                f"context_length {self.context_length} needs rotary factor {factor}, but long_lora_scaling_factors has "
                f"{list(factors) or 'none'}; pass --long-lora-scaling-factors {','.join(map(str, (*factors, factor)))}."
            )
        if self.lora_bias and not lora_config.bias_enabled:
            problems.append(
                "Adapter bias cannot be used without bias_enabled: this adapter has a bias on B (lora_bias); "
                "pass --enable-lora-bias."
            )
        if problems:
            raise ValueError(" ".join(problems))
