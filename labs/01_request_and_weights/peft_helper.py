"""What adapter_config.json says. Stands for vllm/lora/peft_helper.py (v0.22.1)."""

from labs.kit.overlay import Todo
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from minivllm.config import LoRAConfig
from minivllm.lora.checks import check_config, check_fields
from minivllm.lora.extensions import PLAIN, LoRAExtensions
from minivllm.lora.patterns import Patterns
from minivllm.lora.weights_files import read_adapter_config


@dataclass
class PEFTHelper:
    """An adapter's `adapter_config.json`: the fields that change what is computed. vLLM: `PEFTHelper`.

    Unlike vLLM 0.22.1, `rank_pattern` and `alpha_pattern` are honoured, so each module has a scaling of its own. The
    one place that computes it is `scaling(module_name, rank)`. The adapter's tensors tell which modules it has, not the
    config.

    config     all that the file says: `validate_legal` and options read more of it
    extensions  whose options read the adapter, its config, its tensors and its files
    beside     what options found in it, by the option's name; {} for a plain adapter
    pattern_name   module name -> the name that patterns know; an option may say that they differ

    ValueError names a field that is not what its type says. `validate_legal` refuses what is not served.
    """

    r: int
    lora_alpha: float
    target_modules: list[str] | str | None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    vllm_max_position_embeddings: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    extensions: LoRAExtensions = field(default=PLAIN, repr=False)

    def __post_init__(self) -> None:
        check_fields(vars(self))
        self.rank_pattern, self.alpha_pattern = self.rank_pattern or {}, self.alpha_pattern or {}
        fields_of_keys = dict.fromkeys(self.alpha_pattern, "alpha_pattern")
        fields_of_keys |= dict.fromkeys(self.rank_pattern, "rank_pattern")
        self._patterns = Patterns(fields_of_keys) if fields_of_keys else None
        self.ranks = sorted({self.r, *self.rank_pattern.values()})
        self.beside: dict[str, Any] = {}
        self.pattern_name: Callable[[str], str] = str
        for name, option in self.extensions.config_options.items():
            if (value := self.config.get(name)) not in (None, False):
                option.read_config(value, self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], extensions: LoRAExtensions = PLAIN) -> "PEFTHelper":
        """From the parsed JSON; fields that no LoRA server needs are passed over. ValueError: a field missing."""
        if missing := {"r", "lora_alpha", "target_modules"} - config_dict.keys():
            raise ValueError(f"Missing required configuration fields: {', '.join(sorted(missing))}")
        known = config_dict.keys() & {f.name for f in fields(cls)} - {"config", "extensions"}
        return cls(**{name: config_dict[name] for name in known}, config=config_dict, extensions=extensions)

    @classmethod
    def from_local_dir(
        cls,
        lora_path: str,
        max_position_embeddings: int | None = None,
        extensions: LoRAExtensions = PLAIN,
    ) -> "PEFTHelper":
        """From a folder. FileNotFoundError: no folder or no config. ValueError: not JSON, or not LoRA."""
        path, config = read_adapter_config(lora_path)
        # Another kind of adapter (IA3, prompt tuning) lacks LoRA's fields: name the kind, not the fields.
        if config.get("peft_type", "LORA") != "LORA":
            raise ValueError(f"'{path}' has peft_type {config['peft_type']!r}; only LORA is supported")
        try:
            config = {**config, "vllm_max_position_embeddings": max_position_embeddings}
            return cls.from_dict(config, extensions)
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error

    @property
    def key(self) -> str:
        """The same for configs by which tensors of the same names and shapes are read alike."""
        of_options = {name: self.config.get(name) for name in self.extensions.config_options}
        fields = self.r, self.lora_alpha, self.use_rslora, self.rank_pattern, self.alpha_pattern, of_options
        return repr(fields)

    @property
    def vllm_lora_scaling_factor(self) -> float:
        """The scaling of a module that no pattern names. vLLM: the same name."""
        return self.scaling("", self.r)

    # region lab 1.3: scaling of one module
    def scaling(self, module_name: str, rank: int) -> float:
        """The factor on B·A of one module.

        module_name   as Hugging Face names it, e.g. `model.layers.0.self_attn.q_proj`
        rank          of the module's own tensors, which a `rank_pattern` may have set

        alpha / rank, or alpha / sqrt(rank) for rsLoRA (`use_rslora`, https://arxiv.org/abs/2312.03732), alpha being
        the module's.
        """
        raise Todo("lab 1.3: scaling of one module")

    def alpha(self, module_name: str) -> float:
        """The alpha of one module: the first in `alpha_pattern` whose key matches, else `lora_alpha`."""
        raise Todo("lab 1.3: scaling of one module")

    def _matches(self, key: str, module_name: str) -> bool:
        r"""PEFT's rule for the keys of patterns: the key is a regular expression for the end of the name.

        It must begin where a part of the name begins: `q_proj` matches `layers.0.self_attn.q_proj`, `proj` does
        not. So the expression is `(.*\.)?(KEY)$`. `self._patterns.match(expression, name)` says whether `re.match`
        would find it, in limited time. ValueError for a key that takes too long.
        """
        raise Todo("lab 1.3: scaling of one module")

    # endregion

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """ValueError that lists everything in this adapter that the engine will not serve. vLLM: the same name."""
        check_config(self, lora_config)
