"""What adapter_config.json says: scaling (lab 1.3), what is read, and what is refused by name."""

import math

import pytest

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora.peft_helper import PEFTHelper
from tests.worlds.adapter_folders import good_config

Q0, Q1, Q10 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 10))
DOWN = "model.layers.0.mlp.down_proj"


def helper(**changes):
    return PEFTHelper.from_dict(good_config(**changes), LORA_EXTENSIONS)


class TestScaling:
    pytestmark = pytest.mark.lab("1.3")

    @pytest.mark.parametrize(("rank", "alpha"), [(1, 1), (8, 16), (5, 3.5), (6, -2), (64, 0)])
    def test_is_alpha_over_rank(self, rank, alpha):
        assert helper(r=rank, lora_alpha=alpha).scaling(Q0, rank) == alpha / rank

    @pytest.mark.parametrize(("rank", "alpha"), [(4, 16), (8, 16), (5, 3.5)])
    def test_of_rslora_is_alpha_over_the_root_of_the_rank(self, rank, alpha):
        scaling = helper(r=rank, lora_alpha=alpha, use_rslora=True).scaling(Q0, rank)

        assert scaling == pytest.approx(alpha * rank**-0.5, rel=1e-12)

    @pytest.mark.parametrize("use_rslora", [False, True])
    def test_divides_by_the_rank_of_the_tensors_not_by_the_configs(self, use_rslora):
        patterned = helper(r=8, lora_alpha=12, use_rslora=use_rslora, rank_pattern={"q_proj": 4})

        assert patterned.scaling(Q0, 4) == (6 if use_rslora else 3)

    @pytest.mark.parametrize(
        ("key", "matching"),
        [
            ("q_proj", {Q0, Q1, Q10}),
            ("self_attn.q_proj", {Q0, Q1, Q10}),
            (Q1, {Q1}),
            ("layers.1.self_attn.q_proj", {Q1}),
            (r"layers\.\d+\.mlp\.down_proj", {DOWN}),
            (r".*\.0\..*", {Q0, DOWN}),
            (r"layers\.(0|10)\..*", {Q0, Q10, DOWN}),
            (f"^{Q0}", {Q0}),
            ("q_proj|down_proj", {Q0, Q1, Q10, DOWN}),
            # Only whole parts of a name, and only at its end.
            ("proj", set()),
            ("_proj", set()),
            ("model", set()),
            ("self_attn", set()),
            ("0.self_attn.q_proj", {Q0}),
        ],
    )
    def test_takes_alpha_from_the_pattern_where_its_key_matches_as_peft_matches(self, key, matching):
        patterned = helper(r=4, lora_alpha=8, alpha_pattern={key: 20})

        for name in (Q0, Q1, Q10, DOWN):
            scaling, expected = patterned.scaling(name, 4), 5 if name in matching else 2
            assert scaling == expected, f"key '{key}' for {name}: 20 / 4 where it matches, else 8 / 4"

    def test_takes_the_first_of_two_keys_that_match(self):
        first = helper(alpha_pattern={"layers.1.self_attn.q_proj": 10, "q_proj": 20})
        last = helper(alpha_pattern={"q_proj": 20, "layers.1.self_attn.q_proj": 10})

        assert (first.scaling(Q1, 1), first.scaling(Q0, 1)) == (10, 20)
        assert (last.scaling(Q1, 1), last.scaling(Q0, 1)) == (20, 20)

    def test_prefers_a_key_that_comes_first_to_one_that_is_the_whole_name(self):
        """PEFT takes the first key that matches; how well a later one matches does not count."""
        patterned = helper(alpha_pattern={"q_proj": 20, Q1: 10})

        assert patterned.scaling(Q1, 1) == 20

    @pytest.mark.parametrize("key", ["Q_PROJ", "Self_Attn.q_proj", "LAYERS.*"])
    def test_tells_upper_from_lower_case(self, key):
        patterned = helper(lora_alpha=8, alpha_pattern={key: 20})

        assert patterned.scaling(Q0, 4) == 2, f"'{key}' is no end of {Q0}"

    @pytest.mark.parametrize("alpha", [0, 0.0, -3, 2.5])
    @pytest.mark.parametrize("use_rslora", [False, True])
    def test_takes_any_alpha_that_a_pattern_gives(self, alpha, use_rslora):
        """An alpha of 0 turns a module off."""
        patterned = helper(lora_alpha=8, alpha_pattern={"q_proj": alpha}, use_rslora=use_rslora)

        scalings = patterned.scaling(Q0, 4), patterned.scaling(DOWN, 4)

        assert scalings == ((alpha / 2, 4) if use_rslora else (alpha / 4, 2))

    def test_has_only_limited_time_for_a_key(self):
        """Some expressions keep `re` busy for years; those whom `_patterns` stops are refused."""

        class Slow:
            def match(self, expression, name):
                raise ValueError(f"{expression} takes too long")

        patterned = helper(alpha_pattern={"q_proj": 20})
        patterned._patterns = Slow()

        with pytest.raises(ValueError, match=r"q_proj.* takes too long"):
            patterned.scaling(Q0, 4)

    def test_without_a_pattern_is_the_factor_under_vllms_name(self):
        assert helper(r=4, lora_alpha=10).vllm_lora_scaling_factor == 2.5
        assert helper(r=4, lora_alpha=10, use_rslora=True).vllm_lora_scaling_factor == 5
        assert helper(r=4, lora_alpha=10, vllm_lora_scaling_factor=99).vllm_lora_scaling_factor == 2.5


def test_fields_of_other_servers_and_trainers_are_passed_over():
    read = helper(r=5, lora_alpha=2.5, peft_version="9.9", a_field_of_tomorrow={"x": 1})

    assert (read.r, read.lora_alpha, read.target_modules) == (5, 2.5, ["q_proj", "v_proj", "down_proj"])


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_missing_field_is_named(field):
    with pytest.raises(ValueError, match=f"Missing required configuration fields: {field}"):
        helper(**{field: ...})


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"])
def test_null_is_what_peft_does_without_the_field(field):
    read = helper(**{field: None})

    read.validate_legal(LoRAConfig())
    assert read.scaling(Q0, 4) == helper().scaling(Q0, 4)


HUGE = 10**400  # JSON has no largest int; float arithmetic has


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({"r": r}, "LoRA rank r must be an int from 1") for r in (0, -4, "8", 8.0, True, None, [8], HUGE)],
        *[
            ({"lora_alpha": alpha}, "LoRA alpha lora_alpha must be a finite number")
            for alpha in ("16", None, True, [16], math.nan, math.inf, -math.inf, HUGE, -HUGE)
        ],
        *[
            ({"rank_pattern": {"q_proj": rank}}, "LoRA rank q_proj must be an int from 1")
            for rank in (0, "4", None, 2.5, HUGE)
        ],
        *[
            ({"alpha_pattern": {"q_proj": alpha}}, "LoRA alpha q_proj must be a finite number")
            for alpha in ("4", None, math.nan, HUGE)
        ],
        *[
            ({name: pattern}, f"{name} must map module names to numbers")
            for name in ("rank_pattern", "alpha_pattern")
            for pattern in ([], ["q_proj"], "q_proj", 4, True)
        ],
        *[
            ({name: {key: 4}}, f"{name} has key .* is no regular expression")
            for name in ("rank_pattern", "alpha_pattern")
            for key in ("(", "*", "q_proj)", "(?i)q_proj", "[", "x{99999999999999999999}", "(" * 5000, "\\")
        ],
        *[({"use_rslora": value}, "use_rslora must be true or false") for value in ("yes", [], {}, 2.5)],
    ],
)
def test_a_field_of_another_type_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        helper(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"only supports modules_to_save being None, got \['lm_head'\]"),
        (
            {"bias": "all"},
            "Adapter bias cannot be used without bias_enabled.*bias 'all' changes the base model",
        ),
        ({"bias": "lora_only"}, "bias 'lora_only' changes the base model"),
        ({"bias": ["all"]}, r"bias \['all'\]"),
        ({"lora_bias": True}, "lora_bias"),
        *[
            ({"init_lora_weights": init}, f"init_lora_weights '{init}' changes the base model")
            for init in ("pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ],
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj", "experts.scale"]}, "experts.scale"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"monteclora_config": {"num_samples": 4}}, "MonteCLoRA"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 17}, "LoRA rank 17 is greater than max_lora_rank 16; pass --max-lora-rank 17"),
        ({"rank_pattern": {"q_proj": 64}}, "LoRA rank 64 is greater than max_lora_rank 16"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        helper(**changes).validate_legal(LoRAConfig(max_lora_rank=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"use_dora": "true"}, "does not yet support DoRA"),
        ({"alora_invocation_tokens": [5, 6]}, "aLoRA"),
        ({"alora_invocation_tokens": []}, "aLoRA"),
    ],
)
def test_what_an_extension_serves_the_core_by_itself_refuses_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        PEFTHelper.from_dict(good_config(**changes)).validate_legal(LoRAConfig(max_lora_rank=16))


def test_all_reasons_are_told_at_once():
    adapter = PEFTHelper.from_dict(good_config(use_dora=True, bias="all", r=99))

    with pytest.raises(ValueError, match=r"DoRA.*bias 'all'.*rank 99 is greater than max_lora_rank 16"):
        adapter.validate_legal(LoRAConfig(max_lora_rank=16))


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_served(init):
    helper(init_lora_weights=init).validate_legal(LoRAConfig())


def test_a_rank_of_exactly_max_lora_rank_is_served():
    helper(r=16, rank_pattern={"q_proj": 3}).validate_legal(LoRAConfig(max_lora_rank=16))
