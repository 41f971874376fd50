"""What config.json says about a model. Stands for vllm/transformers_utils/config.py (v0.22.1)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.errors import is_finite, shown

# model_type -> the architecture that implements it.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Type -> what it needs. The angles of other types depend on how long a text is.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# What transformers assumes when a config.json leaves these out, for some kinds of model or for all.
ROPE_THETA = {"mixtral": 1e6}
RMS_NORM_EPS = {"mixtral": 1e-5, "phi3": 1e-5}
MISTRAL_SLIDING_WINDOW = 4096
QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class ModelArchitecture:
    """The shape of a base model; every field is a fact of its config.json (vLLM: ModelConfig.hf_config).

    sparse_layers: the numbers of the layers whose MLP is num_experts experts of moe_intermediate_size; each token
    runs num_experts_per_tok of them, whose weights norm_topk_prob makes sum to one. () for a dense model.
    rope_parameters: rope_type, rope_theta and, for a type other than "default", what transformers computes it from.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sparse_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelArchitecture":
        """Read config.json, and the end-of-text ids of generation_config.json where there is one.

        Raises FileNotFoundError without a config.json, ValueError for a model the engine does not know.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; the model must be a Hugging Face folder")
        generation = path.with_name("generation_config.json")
        return cls.from_dict(_read_json(path), _read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> "ModelArchitecture":
        """Parse the contents of config.json. ValueError, naming the key, for what the engine cannot serve."""
        architecture = _architecture(config)
        _refuse_unsupported(config)
        kind = config["model_type"]
        heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        default_head_dim = QWEN3_HEAD_DIM if kind == "qwen3" else hidden_size // heads
        attention_bias = kind in ("llama", "qwen3", "qwen3_moe") and bool(config.get("attention_bias", False))
        parsed = cls(
            architecture=architecture,
            model_type=kind,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_hidden_layers=_required(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or default_head_dim,
            max_position_embeddings=_required(config, "max_position_embeddings"),
            rms_norm_eps=config.get("rms_norm_eps", RMS_NORM_EPS.get(kind, 1e-6)),
            rope_parameters=_rope_parameters(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            sliding_window=_sliding_window(config),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            dtype=_dtype(config),
            **_experts(config),
        )
        if parsed.num_attention_heads % parsed.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {parsed.num_key_value_heads}"
            )
        return parsed

    def resolve_max_model_len(self, requested: int | None = None, position_factor: float = 1.0) -> int:
        """The longest context to serve: as requested, or as long as the model allows.

        position_factor   how many times the model's own positions adapters may stretch a context to

        Raises ValueError past the model's positions, or past a sliding window: within the window attention is
        ordinary attention, and beyond it the engine would answer wrongly.
        """
        positions = int(self.max_position_embeddings * position_factor)
        limit = min(positions, self.sliding_window or positions)
        if requested is None:
            return limit
        if requested < 1:
            raise ValueError(f"max_model_len is {requested} but must be at least 1")
        if requested > positions:
            raise ValueError(
                f"max_model_len {requested} is greater than the model's max_position_embeddings "
                f"{positions}; pass --max-model-len {limit} or less"
            )
        if requested > limit:
            raise ValueError(
                f"max_model_len {requested} is greater than the model's sliding_window {limit}, beyond which "
                f"attention is not supported; pass --max-model-len {limit} or less"
            )
        return requested

    def refuse_uneven_shares(self, size: int) -> None:
        """ValueError unless so many ranks can have equal parts of every layer. It names what cannot be divided, and
        the largest size that fits.
        """
        if (uneven := self._uneven_among(size)) is None:
            return
        smaller = range(min(size, self.num_attention_heads), 0, -1)
        fits = next(s for s in smaller if self._uneven_among(s) is None)
        raise ValueError(
            f"{uneven} cannot be divided by tensor_parallel_size {size}; pass --tensor-parallel-size {fits}"
        )

    def _uneven_among(self, size: int) -> str | None:
        """Name and number of what so many ranks cannot have equal parts of, None = of everything they can.

        Where ranks are more than key-value heads, as many ranks may have each of these.
        """
        has_dense_layers = len(self.sparse_layers) < self.num_hidden_layers
        divides = {
            "num_attention_heads": self.num_attention_heads % size == 0,
            "num_key_value_heads": self.num_key_value_heads % size == 0
            or size % self.num_key_value_heads == 0,
            "intermediate_size": not has_dense_layers or self.intermediate_size % size == 0,
            "moe_intermediate_size": self.moe_intermediate_size % size == 0,
        }
        return next(
            (f"{name} {getattr(self, name)}" for name, is_even in divides.items() if not is_even), None
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def _required(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key!r}")
    return config[key]


def _architecture(config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    architecture = (config.get("architectures") or [ARCHITECTURES[kind]])[0]
    if architecture != ARCHITECTURES[kind]:
        raise ValueError(
            f"architecture {architecture!r} is not supported; use {ARCHITECTURES[kind]} for {kind!r}"
        )
    return architecture


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuse by name what would load and then compute something else."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config (method {method!r}) is not supported; use an unquantized checkpoint"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    shared = [key for key, value in config.items() if "shared_expert" in key and value]
    if shared:
        raise ValueError(
            f"{shared[0]} {config[shared[0]]} is not supported; experts that every token runs are not"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; only 1.0 is"
        )


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before it."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; use one of {', '.join(ROPE_TYPES)}")
    if (config["model_type"], kind) == ("phi3", "yarn"):
        raise ValueError("rope type 'yarn' is not supported for 'phi3', where it stands for longrope")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; only 1.0 is"
        )
    missing = [key for key in ROPE_TYPES[kind] if given.get(key) is None]
    if missing:
        raise ValueError(f"rope type {kind!r} needs {', '.join(missing)} in config.json")
    theta = given.get("rope_theta") or config.get("rope_theta") or ROPE_THETA.get(config["model_type"], 1e4)
    parsed = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        trained = given.get("original_max_position_embeddings") or _required(
            config, "max_position_embeddings"
        )
        beside = {key: value for key, value in given.items() if key != "type" and value is not None}
        parsed = beside | parsed | {"original_max_position_embeddings": trained}
    for key in parsed.keys() & {"rope_theta", "original_max_position_embeddings", *ROPE_TYPES[kind]}:
        if not (is_finite(parsed[key]) and parsed[key] > 0):
            raise ValueError(
                f"{key} {shown(parsed[key])} of rope type {kind!r} must be a number greater than 0"
            )
    return parsed


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelArchitecture that say which layers are sparse, and how."""
    kind = config["model_type"]
    if kind not in ("mixtral", "qwen3_moe"):
        return {}
    # Published configs say num_experts for Qwen3, transformers 5 saves both families as num_local_experts.
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    experts, chosen = _required(config, key), _required(config, "num_experts_per_tok")
    if not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok is {chosen} but must be from 1 to {key} {experts}")
    mixtral = kind == "mixtral"
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return {
        "sparse_layers": tuple(i for i in layers if mixtral or (i not in dense and (i + 1) % step == 0)),
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": _required(
            config, "intermediate_size" if mixtral else "moe_intermediate_size"
        ),
        "norm_topk_prob": mixtral or bool(config.get("norm_topk_prob", False)),
    }


def _sliding_window(config: dict[str, Any]) -> int | None:
    """The window of the layers that have one, or None when every layer sees the whole context."""
    kind = config["model_type"]
    if kind in ("mixtral", "phi3"):
        return config.get("sliding_window")
    window = config.get("sliding_window", MISTRAL_SLIDING_WINDOW)
    if kind == "mistral":
        return window
    if not config.get("use_sliding_window", False):
        return None
    if kind == "qwen3_moe":
        return window  # of every layer, whatever max_window_layers says
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else config.get("max_window_layers", 28) < layers
    return window if slides else None


def _eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text, the model's own first; generation_config.json may add a chat turn's end."""
    ids: list[int] = []
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


def _dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[name]
