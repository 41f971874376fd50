"""Adapters trained at a longer context than the base model (`long_lora_scaling_factors`).

The oracle is transformers with linear rotary scaling and PEFT's adapter on it: what such an adapter was trained on.
"""

import shutil

import pytest
import torch

from minivllm import EngineArgs, LLMEngine, LoRARequest
from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.vllm.layers import LinearScalingRotaryEmbeddingWithLoRA
from tests.oracles.peft import Oracle
from tests.tools.nights import without_gpu_at_night
from tests.worlds.adapters import change_json, save_adapter
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.models import save_base, stretch_positions, token_ids

POSITIONS = 48
# Each adapter's context_length, and the factor that follows from it.
ADAPTERS = {"plain": None, "twofold": 96, "oddly": 130, "within": 40}
FACTORS = {"plain": 1.0, "twofold": 2.0, "oddly": 3.0, "within": 1.0}
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model of 48 positions, and four adapters of which two were trained at longer contexts."""
    root = tmp_path_factory.mktemp("long")
    base = save_base(root / "base", "qwen2-tied")
    change_json(base / "config.json", max_position_embeddings=POSITIONS)
    for seed, (name, context_length) in enumerate(ADAPTERS.items()):
        folder = save_adapter(root / name, base, seed, r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"])
        if context_length:
            change_json(folder / "adapter_config.json", context_length=context_length)
    return root


@pytest.fixture(scope="module")
def oracles(world):
    answers = {}
    for name, factor in FACTORS.items():
        stretched = stretch_positions(world / "base", world / f"stretched-{name}", factor)
        answers[name] = Oracle(stretched)
        answers[name].load(name, world / name)
    return answers


def request(world, name):
    return LoRARequest(name, list(ADAPTERS).index(name) + 1, str(world / name))


def engine(world, **options):
    args = EngineArgs(
        model=str(world / "base"), **{**OPTIONS, "long_lora_scaling_factors": (3.0, 2.0), **options}
    )
    return LLMEngine(args.create_engine_config())


# Prompts that reach beyond what the base model was made for, where the adapter allows it.
PROMPTS = {"plain": 41, "twofold": 88, "oddly": 123, "within": 17, None: 30}


@pytest.mark.parametrize("backend", without_gpu_at_night(["loops", "grouped"], "triton"))
def test_each_row_has_its_own_adapters_angles(world, oracles, backend):
    llm = engine(world, max_loras=4, max_cpu_loras=4, punica_backend=backend)
    prompts = {name: token_ids(length, seed) for seed, (name, length) in enumerate(PROMPTS.items())}

    for name, prompt in prompts.items():
        llm.add_request(
            str(name), prompt, greedy(NEW_TOKENS), lora_request=request(world, name) if name else None
        )
    answers = run(llm)

    for name, prompt in prompts.items():
        expected = oracles[name or "plain"].greedy(name, prompt, NEW_TOKENS)
        assert tokens_of(answers[str(name)]) == expected, f"{name} with {len(prompt)} tokens"


def test_a_slot_takes_the_factor_of_the_adapter_that_comes_into_it(world, oracles):
    llm = engine(world, max_loras=1, max_cpu_loras=1)

    for turn, name in enumerate(["twofold", "plain", "oddly", "twofold", "within"]):
        prompt = token_ids(PROMPTS[name], seed=turn)
        llm.add_request(str(turn), prompt, greedy(NEW_TOKENS), lora_request=request(world, name))
        answer = tokens_of(run(llm)[str(turn)])

        assert answer == oracles[name].greedy(name, prompt, NEW_TOKENS), f"turn {turn}: {name}"


def test_the_adapters_answers_depend_on_their_factor(world, oracles):
    prompt = token_ids(40, seed=1)

    for name in ("twofold", "oddly"):
        stretched = oracles[name].logits(name, [prompt])[0, -1]
        oracles["plain"].load(f"{name} unstretched", world / name)
        plain = oracles["plain"].logits(f"{name} unstretched", [prompt])[0, -1]

        assert (stretched - plain).abs().max() > 0.05 * plain.abs().max()


def test_a_factor_that_the_engine_was_not_made_for_is_refused(world):
    llm = engine(world, long_lora_scaling_factors=(2.0,))

    with pytest.raises(
        ValueError,
        match=r"adapter 'oddly'.*context_length 130.*factor 3\.0.*has \[2\.0\].*--long-lora-scaling-factors",
    ):
        llm.add_request("1", [3, 4, 5], greedy(), lora_request=request(world, "oddly"))
    with pytest.raises(ValueError, match="has none"):
        engine(world, long_lora_scaling_factors=None).add_lora(request(world, "twofold"))


@pytest.mark.parametrize(
    ("name", "limit"), [(None, POSITIONS), ("plain", POSITIONS), ("twofold", 96), ("oddly", 144)]
)
def test_a_request_may_be_as_long_as_its_adapters_context(world, name, limit):
    llm = engine(world, max_model_len=None)
    lora = request(world, name) if name else None

    with pytest.raises(ValueError, match=f"{limit}"):
        llm.add_request("too long", token_ids(limit, 1), greedy(), lora_request=lora)
    llm.add_request("fits", token_ids(limit - 3, 1), greedy(50), lora_request=lora)

    output = run(llm)["fits"]
    assert len(tokens_of(output)) == 3
    assert output.outputs[0].finish_reason == "length"
    assert "too long" not in llm.scheduler.requests


def test_the_longest_context_is_the_largest_factors(world):
    assert engine(world).config.model_config.max_model_len == 3 * POSITIONS
    assert engine(world, max_model_len=100).config.model_config.max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len 145 is greater"):
        engine(world, max_model_len=145)


def test_a_reload_brings_its_own_factor(world, oracles, tmp_path):
    folder = tmp_path / "changing"
    shutil.copytree(world / "plain", folder)
    llm = engine(world)
    lora = LoRARequest("changing", 9, str(folder))
    short = token_ids(20, seed=3)
    llm.add_request("before", short, greedy(NEW_TOKENS), lora_request=lora)
    before = tokens_of(run(llm)["before"])
    shutil.copytree(world / "twofold", folder, dirs_exist_ok=True)

    again = LoRARequest("changing", 9, str(folder), load_inplace=True)
    llm.add_request("after", token_ids(80, seed=4), greedy(NEW_TOKENS), lora_request=again)
    after = tokens_of(run(llm)["after"])

    assert before == oracles["plain"].greedy("plain", short, NEW_TOKENS)
    assert after == oracles["twofold"].greedy("twofold", token_ids(80, seed=4), NEW_TOKENS)


@pytest.mark.parametrize(
    ("context_length", "positions", "factor"),
    [(None, 48, 1), (48, 48, 1), (49, 48, 2), (96, 48, 2), (8192, 2048, 4), (100, None, 1), (0, 48, 1)],
)
def test_the_factor_is_the_context_over_the_models_rounded_up(context_length, positions, factor):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "context_length": context_length}

    helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": positions}, LORA_EXTENSIONS)

    assert helper.beside.get("scaling_factor", 1) == factor


@pytest.mark.parametrize("length", ["4096", -1, 2.5, True, 10**400])
def test_a_context_length_that_is_no_length_is_refused(length):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "context_length": length}

    with pytest.raises(ValueError, match="context_length"):
        PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": 48}, LORA_EXTENSIONS)


@pytest.mark.parametrize(
    "factors",
    [[0], [0.5], [2, float("inf")], "2.0", [float("nan")], 4.0, [10**400], [{"factor": 2.0}], [{"low": 1}]],
)
def test_what_is_no_factor_is_refused(factors):
    with pytest.raises(ValueError, match="long_lora_scaling_factors"):
        LoRAConfig(long_lora_scaling_factors=factors)


# What documents show: a factor of 1, which every adapter has, and frequencies that nothing scales.
NOTHING_TO_STRETCH = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}


@pytest.mark.parametrize("factors", [[1.0], [NOTHING_TO_STRETCH]])
def test_a_factor_of_one_is_taken_and_adds_no_table(factors):
    assert LoRAConfig(long_lora_scaling_factors=factors).long_lora_scaling_factors == ()
    assert LoRAConfig(long_lora_scaling_factors=[*factors, 2]).long_lora_scaling_factors == (2.0,)


def default_rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def test_a_model_of_shapes_alone_has_tables_of_any_length():
    """`minivllm inspect` makes one for what an adapter asks for, which may be nonsense."""
    base = RotaryEmbedding(6, 10, default_rope(10000.0), torch.float64, "meta")

    wrapped = LinearScalingRotaryEmbeddingWithLoRA(base, (2.0**32,), max_loras=2)

    assert wrapped.cos.is_meta and len(wrapped.cos) == 10 + 10 * 2**32


def test_the_tables_are_the_angles_of_divided_positions():
    """cos(p / f * theta^(-2i / D)) in float64, for each row's own f."""
    theta, size = 100.0, 6
    base = RotaryEmbedding(size, 10, default_rope(theta), torch.float64)
    wrapped = LinearScalingRotaryEmbeddingWithLoRA(base, (2.0, 2.5), max_loras=2)
    slots = torch.tensor([-1, 0, 1, 0, -1])

    class Backend:
        no_lora = False

        def token_slots(self, tokens):
            return slots[:tokens]

    wrapped.set_mapping(Backend())
    wrapped.set_factors([2.5, 2.0])
    positions = torch.tensor([9, 24, 19, 7, 3])

    cos, sin = wrapped(positions)

    factors = torch.tensor([1, 2.5, 2, 2.5, 1], dtype=torch.float64)
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (positions / factors)[:, None] * frequencies
    assert torch.allclose(cos[:, 0, :3], angles.cos(), atol=1e-5)
    assert torch.allclose(sin[:, 0, 3:], angles.sin(), atol=1e-5)
