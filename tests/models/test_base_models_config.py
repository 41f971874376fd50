"""config.json, in old or new spelling, becomes the right shape; what cannot be served is refused by name."""

import json

import pytest
import torch

from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS, get_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# As published: with the experts' number under another name than transformers 5 gives it.
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(rope_type="default", rope_theta=500.0, **others):
    """As it is read; where it scales positions, the context of before is the model's unless it is given."""
    context = {} if rope_type == "default" else {"original_max_position_embeddings": 4096}
    return {"rope_type": rope_type, "rope_theta": rope_theta, **context, **others}


# What is in a config.json, and what is read.
ROPES = [
    ({}, rope(rope_theta=10000.0)),
    ({"rope_theta": 500.0}, rope()),
    ({"rope_theta": 500.0, "rope_scaling": None}, rope()),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, rope()),
    ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, rope("linear", factor=2.0)),
    (
        {
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3},
        },
        rope("llama3", original_max_position_embeddings=512, **LLAMA3),
    ),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}, rope("llama3", **LLAMA3)),
    (
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 3}},
        rope("yarn", factor=2.0, beta_slow=3),
    ),
]


@pytest.mark.parametrize(("keys", "expected"), ROPES)
def test_rotary_settings_are_read_in_either_spelling(keys, expected):
    assert ModelArchitecture.from_dict(LLAMA | keys).rope_parameters == expected


@pytest.mark.parametrize(
    "config",
    [LLAMA, MISTRAL, QWEN2, QWEN3, PHI3 | {"pad_token_id": 0}, MIXTRAL, QWEN3_MOE],
    ids=lambda config: config["model_type"],
)
def test_what_a_config_leaves_out_is_what_transformers_assumes(config):
    from transformers import AutoConfig

    bare = {key: value for key, value in config.items() if key != "rms_norm_eps"}
    theirs = AutoConfig.for_model(**bare)

    ours = ModelArchitecture.from_dict(bare)

    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (LLAMA, (False, False, False)),
        (LLAMA | {"attention_bias": True}, (True, True, False)),
        (LLAMA | {"mlp_bias": True}, (False, False, True)),
        (MISTRAL, (False, False, False)),
        (QWEN2, (True, False, False)),
        (QWEN3 | {"attention_bias": True}, (True, True, False)),
        (PHI3, (False, False, False)),
        (QWEN3_MOE | {"attention_bias": True}, (True, True, False)),
    ],
)
def test_which_linears_have_a_bias(config, biases):
    parsed = ModelArchitecture.from_dict(config)

    assert (parsed.qkv_bias, parsed.o_bias, parsed.mlp_bias) == biases


def test_what_an_older_config_leaves_out():
    bare = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "eos_token_id")}

    parsed = ModelArchitecture.from_dict(bare | {"head_dim": None})

    assert (parsed.num_key_value_heads, parsed.head_dim, parsed.eos_token_ids) == (4, 12, ())
    assert (parsed.tie_word_embeddings, parsed.qk_norm, parsed.dtype) == (False, False, torch.float32)
    assert ModelArchitecture.from_dict(QWEN3).head_dim == 128


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_checkpoints_dtype_is_read_in_either_spelling(key):
    assert ModelArchitecture.from_dict(LLAMA | {key: "bfloat16"}).dtype == torch.bfloat16


def test_end_of_text_ids_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 8]}))

    assert ModelArchitecture.from_folder(tmp_path).eos_token_ids == (7, 9, 8)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LLAMA, 4096),
        (MISTRAL | {"sliding_window": None}, 4096),
        (MISTRAL | {"sliding_window": 1024}, 1024),
        (QWEN2 | {"sliding_window": 1024, "use_sliding_window": False}, 4096),
        (QWEN2 | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 1}, 1024),
        (QWEN2 | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, 4096),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            4096,
        ),
        (MIXTRAL, 4096),
        (MIXTRAL | {"sliding_window": 1024}, 1024),
        (PHI3 | {"sliding_window": 2047}, 2047),
        (QWEN3_MOE | {"sliding_window": 1024, "use_sliding_window": False, "max_window_layers": 1}, 4096),
        (QWEN3_MOE | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 9}, 1024),
    ],
)
def test_the_context_ends_where_a_sliding_window_would_begin_to_slide(config, limit):
    parsed = ModelArchitecture.from_dict(config)

    assert parsed.resolve_max_model_len() == parsed.resolve_max_model_len(limit) == limit
    assert parsed.resolve_max_model_len(100) == 100
    with pytest.raises(ValueError, match=f"max_model_len {limit + 1} is greater than .* {limit}"):
        parsed.resolve_max_model_len(limit + 1)
    with pytest.raises(ValueError, match="max_model_len is 0"):
        parsed.resolve_max_model_len(0)


REFUSED = {
    "model_type 'gpt2'": {"model_type": "gpt2"},
    "model_type None": {"model_type": None},
    "LlamaForSequenceClassification": {"architectures": ["LlamaForSequenceClassification"]},
    "MistralForCausalLM": {"architectures": ["MistralForCausalLM"]},
    "'bitsandbytes'": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "rope type 'yarn' needs factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "factor 'two' of rope type 'yarn'": {"rope_scaling": {"type": "yarn", "factor": "two"}},
    "factor 0 of rope type 'linear'": {"rope_scaling": {"type": "linear", "factor": 0}},
    "rope_theta nan of rope type 'default'": {"rope_theta": float("nan")},
    "rope type 'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "needs factor": {"rope_scaling": {"type": "linear"}},
    "needs low_freq_factor, high_freq_factor": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "partial_rotary_factor 0.25": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "rope type 'longrope'": {
        "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
    },
    "shared_expert_intermediate_size 512": {"shared_expert_intermediate_size": 512},
    "n_shared_experts 1": {"n_shared_experts": 1},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "dtype 'int8'": {"dtype": "int8"},
    "no 'vocab_size'": {"vocab_size": None},
    "num_attention_heads 4 is not a multiple of num_key_value_heads 3": {"num_key_value_heads": 3},
    "no 'num_experts'": MIXTRAL | {"num_local_experts": None},
    "no 'num_experts_per_tok'": MIXTRAL | {"num_experts_per_tok": None},
    "num_experts_per_tok is 9 .* 1 to num_local_experts 8": MIXTRAL | {"num_experts_per_tok": 9},
    "num_experts_per_tok is 0 .* 1 to num_experts 16": QWEN3_MOE | {"num_experts_per_tok": 0},
    "no 'moe_intermediate_size'": QWEN3_MOE | {"moe_intermediate_size": None},
    "model_type 'qwen2_moe'": QWEN3_MOE | {"model_type": "qwen2_moe"},
    "partial_rotary_factor 0.75": PHI3 | {"partial_rotary_factor": 0.75},
    "rope type 'yarn' .* 'phi3'": PHI3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_unknown_config_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        ModelArchitecture.from_dict(LLAMA | REFUSED[message])


def test_the_number_of_experts_is_read_under_either_name():
    renamed = QWEN3_MOE | {"num_local_experts": QWEN3_MOE["num_experts"], "num_experts": None}

    parsed = ModelArchitecture.from_dict(QWEN3_MOE)

    assert parsed.num_experts == 16
    assert ModelArchitecture.from_dict(renamed) == parsed
    assert ModelArchitecture.from_dict(LLAMA).sparse_layers == ()


@pytest.mark.parametrize(("given", "expected"), [(None, False), (False, False), (True, True)])
def test_only_mixtral_always_makes_the_experts_weights_sum_to_one(given, expected):
    key = {} if given is None else {"norm_topk_prob": given}

    assert ModelArchitecture.from_dict(QWEN3_MOE | key).norm_topk_prob is expected
    assert ModelArchitecture.from_dict(MIXTRAL | key).norm_topk_prob


def test_a_folder_without_a_readable_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        get_model(tmp_path / "nowhere")

    for text, said in (("{", "is not valid JSON"), ("[]", "holds a list, expected a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json {said}"):
            get_model(tmp_path)


@pytest.mark.parametrize(
    "config",
    [LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, MIXTRAL, QWEN3_MOE],
    ids=lambda config: config["model_type"],
)
def test_every_accepted_architecture_has_a_model(config):
    parsed = ModelArchitecture.from_dict({key: config[key] for key in config if key != "architectures"})

    assert parsed.architecture == config["architectures"][0]
    assert MODELS[parsed.architecture].supports_lora
