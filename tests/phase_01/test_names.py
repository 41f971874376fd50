"""Names: of adapter tensors (lab 1.2), and of modules."""

from types import SimpleNamespace

import pytest

from minivllm.lora.checks import nearest_names
from minivllm.lora.names import is_in_target_modules, parse_fine_tuned_lora_name
from minivllm.vllm.utils import (
    is_base_embedding_weights,
    is_supported_lora_module,
)

UP = "model.layers.0.mlp.up_proj"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class TestTensorNames:
    pytestmark = pytest.mark.lab("1.2")

    @pytest.mark.parametrize("prefix", ["base_model.model.", ""])
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            (f"{UP}.lora_A.weight", (UP, True)),
            (f"{UP}.lora_B.weight", (UP, False)),
            ("lm_head.lora_A.weight", ("lm_head", True)),
            ("model.embed_tokens.lora_embedding_A", ("model.embed_tokens", True)),
            ("model.embed_tokens.lora_embedding_B", ("model.embed_tokens", False)),
            # Names that hold what the rule looks for, elsewhere.
            ("lora_A.weight.lora_B.weight", ("lora_A.weight", False)),
            ("model.lora_A.q_proj.lora_B.weight", ("model.lora_A.q_proj", False)),
            ("model.base_model.model.q_proj.lora_A.weight", ("model.base_model.model.q_proj", True)),
        ],
    )
    def test_give_the_module_and_the_side(self, prefix, name, expected):
        assert parse_fine_tuned_lora_name(prefix + name) == expected

    def test_lose_one_prefix_although_it_stands_there_twice(self):
        """PEFT puts it once before the name in the model, and a model may itself begin with `base_model.model`."""
        name = f"base_model.model.base_model.model.{UP}.lora_A.weight"

        assert parse_fine_tuned_lora_name(name) == (f"base_model.model.{UP}", True)

    @pytest.mark.parametrize(
        "name",
        [
            f"base_model.model.{UP}.weight",
            f"base_model.model.{UP}.lora_A.bias",
            f"base_model.model.{UP}.lora_A",
            f"base_model.model.{UP}.lora_A.default.weight",
            f"base_model.model.{UP}.lora_A.default",
            f"base_model.model.{UP}.lora_C.weight",
            f"base_model.model.{UP}.lora_embedding_A.weight",
            f"base_model.model.{UP}.base_layer.weight",
            "base_model.model.lora_A.weight",
            "lora_A.weight",
            "lora_embedding_B",
            f"base_model.model.{UP}.my_lora_A.weight",
            f"base_model.model.{UP}lora_B.weight",
            f"base_model.model.{UP}.my_lora_embedding_A",
            f"base_model.model.{UP}.lora_a.weight",
            f"base_model.model.{UP}.LORA_B.weight",
            "weight",
            "",
            ".",
        ],
    )
    def test_that_are_neither_a_nor_b_are_refused(self, name):
        try:
            parsed = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            assert name in str(error)
        else:
            raise AssertionError(f"{name!r} is no LoRA weight; it must raise ValueError, and gave {parsed}")

    @pytest.mark.parametrize(
        ("end", "why"),
        [
            (".lora_magnitude_vector", "DoRA"),
            (".lora_B.bias", "lora_bias=False"),
            (".base_layer.bias", "bias='none'"),
            (".trainable_tokens_delta", "trainable_token_indices"),
            (".embed_tokens.weight", "save_embedding_layers=False"),
            (".lm_head.weight", "save_embedding_layers=False"),
            (".score.weight", "only lora_A, lora_B"),
        ],
    )
    def test_that_peft_writes_for_something_else_say_what_it_is(self, end, why):
        with pytest.raises(ValueError, match=f"unsupported LoRA weight.*{why}"):
            parse_fine_tuned_lora_name(f"base_model.model.model.x{end}")

    @pytest.mark.parametrize("prefix", ["base_model.model.", ""])
    def test_are_mapped_to_the_models_without_pefts_prefix(self, prefix):
        mapper = SimpleNamespace(_map_name=lambda name: name.replace("model.", "language_model.model.", 1))

        parsed = parse_fine_tuned_lora_name(f"{prefix}{UP}.lora_B.weight", mapper)

        assert parsed == (f"language_model.{UP}", False)

    def test_that_the_mapper_does_not_know_stay_as_they_are(self):
        mapper = SimpleNamespace(_map_name=lambda name: None)

        assert parse_fine_tuned_lora_name(f"base_model.model.{UP}.lora_A.weight", mapper) == (UP, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base_model.model.model.embed_tokens.base_layer.weight", True),
        ("base_model.model.lm_head.base_layer.weight", True),
        ("lm_head.base_layer.weight", True),
        # A change to the base that other adapters share is not to be passed over.
        (f"base_model.model.{UP}.base_layer.weight", False),
        (f"base_model.model.{UP}.base_layer.bias", False),
        ("base_model.model.model.embed_tokens.weight", False),
        ("base_model.model.model.embed_tokens.lora_embedding_A", False),
        ("base_model.model.my_lm_head.base_layer.weight", False),
    ],
)
def test_only_pefts_copies_of_base_embeddings_are_passed_over(name, expected):
    assert is_base_embedding_weights(name) is expected


def test_a_module_is_supported_by_its_name_or_the_end_of_it():
    supported = ["q_proj", "mlp.up_proj"]

    assert is_supported_lora_module("q_proj", supported)
    assert is_supported_lora_module("model.layers.0.self_attn.q_proj", supported)
    assert is_supported_lora_module(UP, supported)
    assert not is_supported_lora_module("model.my_q_proj", supported)
    assert not is_supported_lora_module("model.q_proj.inner", supported)
    assert not is_supported_lora_module("up_proj", supported)


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        (UP, None, True),
        (UP, ["up_proj"], True),
        (UP, [UP], True),
        (UP, ["model.layers.1.mlp.up_proj"], False),
        (UP, ["gate_up_proj"], True),
        (UP, ["gate_proj"], False),
        ("model.layers.0.self_attn.qkv_proj", ["v_proj"], True),
        ("model.layers.0.self_attn.qkv_proj", ["up_proj", "o_proj"], False),
        (UP, [], False),
    ],
)
def test_the_servers_targets_match_fused_modules_and_their_parts(name, targets, expected):
    assert is_in_target_modules(name, targets, PACKED) is expected


def test_the_nearest_names_come_first_and_strangers_not_at_all():
    known = ["model.layers.0.self_attn.q_proj", UP, "lm_head"]

    assert nearest_names("model.layers.0.mlp.up", known)[0] == UP
    assert nearest_names("zzz", known) == []
