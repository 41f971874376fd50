"""What adapter_config.json says, and what of it is not served. Stands for vllm/lora/peft_helper.py (v0.22.1)."""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from minivllm.config import LoRAConfig
from minivllm.errors import shown
from minivllm.lora.checks import NeedsOption
from minivllm.lora.extensions import PLAIN, LoRAExtensions
from minivllm.lora.limits import CONFIG_BYTES
from minivllm.lora.patterns import PLAIN_KEY, Patterns
from minivllm.lora.weights_files import reading

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


@dataclass
class PEFTHelper:
    """An adapter's `adapter_config.json`: the fields that change what is computed. vLLM: `PEFTHelper`.

    `rank_pattern` and `alpha_pattern` give each module a scaling of its own. The one place that computes it is
    `scaling(module_name, rank)`. The adapter's tensors tell which modules it has, not the config.

    An option is something that an adapter may have beyond A and B, such as a bias on B (`extensions.AdapterOption`).

    config     all that the file says: `validate_legal` and options read more of it
    extensions  the engine's options, which read the adapter's config, tensors and files, and what else it was given
    beside     what options found in it, by the option's name; {} for a plain adapter
    pattern_name   module name -> the name that patterns know; an option may say that they differ
    key        two configs with the same key read tensors of the same names and shapes alike

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
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(pattern := getattr(self, name), dict | None):
                raise ValueError(f"{name} must map module names to numbers, got {pattern!r}")
            if pattern:
                _check_keys(name, list(pattern))
        self.rank_pattern, self.alpha_pattern = self.rank_pattern or {}, self.alpha_pattern or {}
        ranks = {f"rank_pattern: LoRA rank {key}": rank for key, rank in self.rank_pattern.items()}
        for name, rank in {"LoRA rank r": self.r, **ranks}.items():
            if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
                raise ValueError(f"{name} must be an int from 1 to {LARGEST_RANK}, got {shown(rank)}")
        alphas = {f"alpha_pattern: LoRA alpha {key}": alpha for key, alpha in self.alpha_pattern.items()}
        for name, alpha in {"LoRA alpha lora_alpha": self.lora_alpha, **alphas}.items():
            # NaN is not <= anything.
            if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
                raise ValueError(f"{name} must be a finite number, got {shown(alpha)}")
        if not isinstance(self.use_rslora, bool | None):
            raise ValueError(f"use_rslora must be true or false, got {shown(self.use_rslora)}")
        fields_of_keys = dict.fromkeys(self.alpha_pattern, "alpha_pattern")
        fields_of_keys |= dict.fromkeys(self.rank_pattern, "rank_pattern")
        self._patterns = Patterns(fields_of_keys) if fields_of_keys else None
        self.ranks = sorted({self.r, *self.rank_pattern.values()})
        self.beside: dict[str, Any] = {}
        self.pattern_name: Callable[[str], str] = str
        for option in self.extensions.options:
            if (value := self.config.get(option.config_field)) not in (None, False):
                option.read_config(value, self)
        of_options = [self.config.get(option.config_field) for option in self.extensions.options]
        patterns = self.rank_pattern, self.alpha_pattern
        self.key = repr((self.r, self.lora_alpha, self.use_rslora, *patterns, of_options))

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
    def vllm_lora_scaling_factor(self) -> float:
        """The scaling of a module that no pattern names. vLLM: the same name."""
        return self.scaling("", self.r)

    # region lab 1.3: scaling of one module
    def scaling(self, module_name: str, rank: int) -> float:
        """The factor on B·A of one module, as it was in training (rsLoRA: https://arxiv.org/abs/2312.03732).

        module_name   as Hugging Face names it, e.g. `model.layers.0.self_attn.q_proj`
        rank          of the module's own tensors, which a `rank_pattern` may have set
        """
        alpha = self.alpha(module_name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def alpha(self, module_name: str) -> float:
        """The alpha of one module. Of several keys of `alpha_pattern` that match, PEFT takes the first."""
        matching = (alpha for key, alpha in self.alpha_pattern.items() if self._matches(key, module_name))
        return next(matching, self.lora_alpha)

    def _matches(self, key: str, module_name: str) -> bool:
        """Whether PEFT would apply this key of a pattern to a module.

        The key is a regular expression for the end of the name, from where a part of the name begins. The module
        `layers.0.self_attn.q_proj` is matched by `q_proj`, by `self_attn.q_proj` and by `q_proj|o_proj`, and not by
        `proj` or `self_attn`.

        `self._patterns.match(expression, module_name)` is `re.match` with a limit of time: a key comes from the
        adapter's file, and one that takes too long raises ValueError. `_patterns` is None if the config has no key.
        """
        return self._patterns.match(rf"(.*\.)?({key})$", module_name)

    # endregion

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """ValueError that lists everything in this config that the engine will not serve. vLLM: the same name.

        It is a NeedsOption if options of the engine would admit all of that.
        """
        config, problems = self.config, []  # sentences, and each NeedsOption
        if (peft_type := config.get("peft_type", "LORA")) != "LORA":
            problems.append(f"peft_type {peft_type!r} is not supported, only LORA.")
        if saved := config.get("modules_to_save"):
            problems.append(f"The engine only supports modules_to_save being None, got {saved!r}.")
        of_options = {option.config_field for option in self.extensions.options}
        if config.get("use_dora") and "use_dora" not in of_options:
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
        refused = dict(REFUSED_FIELDS)
        for option in self.extensions.options:
            refused.pop(option.config_field, None)  # it says itself what of it is not served
            if (value := config.get(option.config_field)) not in (None, False):
                problems += option.check_config(value, self, lora_config)
        for name, sentence in refused.items():
            value = config.get(name)
            if value or (name == "alora_invocation_tokens" and value not in (None, False)):
                problems.append(sentence.format(shown(value)))
        if (largest := self.ranks[-1]) > lora_config.max_lora_rank:
            sentence = f"LoRA rank {largest} is greater than max_lora_rank {lora_config.max_lora_rank}; "
            sentence += f"pass --max-lora-rank {largest}."
            problems.append(NeedsOption(sentence, max_lora_rank=largest))
        if not problems:
            return
        text = " ".join(map(str, problems))
        if all(isinstance(problem, NeedsOption) for problem in problems):
            raise NeedsOption(
                text, **{name: v for problem in problems for name, v in problem.options.items()}
            )
        raise ValueError(text)


# ---- the file -------------------------------------------------------------------------------------------------


def read_adapter_config(lora_dir: str) -> tuple[str, dict[str, Any]]:
    """Path and fields of a folder's adapter_config.json.

    FileNotFoundError: no such folder, or no config in it. ValueError names a config that cannot be read or parsed, is
    beyond our limits (`limits`), or is no JSON object.
    """
    if os.path.exists(lora_dir) and not os.path.isdir(lora_dir):
        raise FileNotFoundError(
            f"'{lora_dir}' is a file, and an adapter is a folder; give the folder that has its adapter_config.json"
        )
    if not os.path.isdir(lora_dir):
        raise FileNotFoundError(f"adapter folder '{lora_dir}' does not exist")
    path = os.path.join(lora_dir, "adapter_config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{lora_dir}' has no adapter_config.json, so it is not an adapter folder")
    with reading(path) as file:
        data, nbytes = file.read(CONFIG_BYTES + 1), os.fstat(file.fileno()).st_size
    if len(data) > CONFIG_BYTES:
        raise ValueError(f"'{path}' has {nbytes} bytes, more than the {CONFIG_BYTES} that a config may have")
    try:
        config = json.loads(data.decode(), object_pairs_hook=without_duplicates)
        check_depth(config)
    # ValueError: not JSON, not UTF-8, an int of 5,000 digits. RecursionError: brackets in brackets in brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"'{path}' holds a {type(config).__name__}, expected a JSON object")
    return path, config


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
