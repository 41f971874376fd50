"""What adapter_config.json says, and what we refuse. Stands for vllm/lora/peft_helper.py (v0.22.1)."""

import json
import math
import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from minivllm.config import LoRAConfig

# Initialisations that move part of the base weight into the adapter: on an unmoved base they are wrong.
BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq")


@dataclass
class PEFTHelper:
    """An adapter's `adapter_config.json`. vLLM: `PEFTHelper`.

    Unlike vLLM 0.22.1, `rank_pattern` and `alpha_pattern` are honoured: scaling is a matter of the module, so it
    is asked for by `scaling(module_name, rank)`, the one place that computes it. `vllm_lora_scaling_factor` is
    the scaling of a module that no pattern names.
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
    vllm_lora_scaling_factor: float = 1.0
    vllm_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"LoRA rank r must be an int of at least 1, got {self.r!r}")
        alphas = {"lora_alpha": self.lora_alpha, **(self.alpha_pattern or {})}
        for name, alpha in alphas.items():
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
                raise ValueError(f"{name} must be a finite number, got {alpha!r}")
        self.rank_pattern = self.rank_pattern or {}
        self.alpha_pattern = self.alpha_pattern or {}
        self.vllm_lora_scaling_factor = self._scale(self.lora_alpha, self.r)

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
        folder = Path(lora_path)
        if not folder.is_dir():
            raise FileNotFoundError(f"adapter folder '{lora_path}' does not exist")
        path = folder / "adapter_config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"'{lora_path}' has no adapter_config.json, so it is not an adapter folder"
            )
        try:
            config = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"'{path}' is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"'{path}' holds {type(config).__name__}, expected a JSON object")
        # Another kind of adapter (IA3, prompt tuning) lacks LoRA's fields: name the kind, not the fields.
        if config.get("peft_type", "LORA") != "LORA":
            raise ValueError(f"'{path}' has peft_type '{config['peft_type']}'; only LORA is supported")
        config["vllm_max_position_embeddings"] = max_position_embeddings
        return cls.from_dict(config)

    # region lab 1.3: scaling of one module
    def scaling(self, module_name: str, rank: int) -> float:
        """The factor on B·A of one module.

        module_name   as Hugging Face names it, e.g. `model.layers.0.self_attn.q_proj`
        rank          of the module's own tensors, which a `rank_pattern` may have set

        alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732), where alpha is the
        first `alpha_pattern` that matches, else `lora_alpha`.
        """
        alpha = next(
            (alpha for key, alpha in self.alpha_pattern.items() if self._matches(key, module_name)),
            self.lora_alpha,
        )
        return self._scale(alpha, rank)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @staticmethod
    def _matches(key: str, module_name: str) -> bool:
        """PEFT's rule for the keys of patterns: the key is a regular expression for the end of the name."""
        return re.match(rf"(.*\.)?({key})$", module_name) is not None

    # endregion

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """ValueError that lists everything in this adapter that the engine will not serve. vLLM: the same name."""
        problems = [text for refused, text in self._refusals() if refused]
        largest = max([self.r, *self.rank_pattern.values()])
        if largest > lora_config.max_lora_rank:
            problems.append(
                f"LoRA rank {largest} is greater than max_lora_rank {lora_config.max_lora_rank}; "
                f"pass --max-lora-rank {largest}."
            )
        if problems:
            raise ValueError(" ".join(problems))

    def _refusals(self) -> list[tuple[Any, str]]:
        init = str(self.init_lora_weights).lower()
        return [
            (self.peft_type != "LORA", f"peft_type '{self.peft_type}' is not supported, only LORA."),
            (
                self.modules_to_save,
                f"The engine only supports modules_to_save being None, got {self.modules_to_save}.",
            ),
            (self.use_dora, "The engine does not yet support DoRA; train without use_dora."),
            (
                self.bias != "none",
                f"Adapter bias is not supported: bias '{self.bias}' changes the base model that all adapters "
                "share; train with bias='none'.",
            ),
            (self.lora_bias, "lora_bias (a bias on B) is not supported; train with lora_bias=False."),
            (
                init.startswith(BASE_CHANGING_INITIALISATIONS),
                f"init_lora_weights '{self.init_lora_weights}' changes the base weights; convert the adapter to "
                "plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...).",
            ),
            (self.layer_replication, "layer_replication changes the base model and is not supported."),
            (self.trainable_token_indices, "trainable_token_indices is not supported."),
            (self.alora_invocation_tokens, "aLoRA (alora_invocation_tokens) is not supported."),
            (self.target_parameters, f"target_parameters {self.target_parameters} is not supported."),
            (self.use_qalora, "QALoRA (use_qalora) is not supported."),
            (self.use_bdlora, "BD-LoRA (use_bdlora) is not supported."),
            (self.arrow_config, "Arrow (arrow_config) is not supported."),
        ]
