"""Adapters of parameters as PEFT saves them, folded by hand: number by number, without PEFT."""

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from tests.oracles.rows import assert_rows_equal
from tests.worlds.adapter_folders import PREFIX, good_config, good_tensors

EXPERTS = "model.layers.3.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
COUNT, HIDDEN, INNER = 4, 5, 7
SHAPES = {GATE_UP: (HIDDEN, 2 * INNER), DOWN: (INNER, HIDDEN)}  # (K, N)


def helper(*targets, **config):
    return PEFTHelper.from_dict(good_config(target_parameters=list(targets), **config), LORA_EXTENSIONS)


def of_experts(parameter, rank, seed=0):
    """A (r, K) and B (N, r) of every expert."""
    generator = torch.Generator().manual_seed(seed)
    width, height = SHAPES[parameter]
    return [
        [torch.randn(shape, generator=generator) for shape in ((rank, width), (height, rank))]
        for _ in range(COUNT)
    ]


def folded(pairs):
    """A (E * r, K), the experts one below the other; B (N, E * r), column 0 of all experts, then column 1 of all."""
    rank = len(pairs[0][0])
    lora_a = torch.cat([a for a, _ in pairs])
    lora_b = torch.stack([b[:, k] for k in range(rank) for _, b in pairs], dim=1)
    return {"lora_A": lora_a, "lora_B": lora_b}


def saved(place, pairs):
    return {f"{PREFIX}{place}.{side}.weight": tensor for side, tensor in folded(pairs).items()}


def assert_unfolded(lora, parameter, pairs):
    weights = lora.loras[parameter]
    for expert, (a, b) in enumerate(pairs):
        assert_rows_equal(weights.lora_a[expert], a, what=f"A of expert {expert}")
        assert_rows_equal(weights.lora_b[expert], b, what=f"B of expert {expert}")


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_every_expert_has_its_own_a_and_b(rank):
    gate_up, down = of_experts(GATE_UP, rank, seed=1), of_experts(DOWN, rank, seed=2)
    tensors = {**saved(f"{EXPERTS}.base_layer", gate_up), **saved(EXPERTS, down)}

    lora = LoRAModel.from_lora_tensors(1, tensors, helper("gate_up_proj", "down_proj", r=rank))

    assert lora.loras.keys() == {GATE_UP, DOWN}
    assert_unfolded(lora, GATE_UP, gate_up)
    assert_unfolded(lora, DOWN, down)
    assert lora.rank == rank


@pytest.mark.parametrize("parameter", [GATE_UP, DOWN])
def test_the_config_tells_which_parameter_it_is_where_there_is_one(parameter):
    pairs = of_experts(parameter, 3)
    _, _, last = parameter.rpartition(".")

    for target in (parameter, last, f"experts.{last}", f"3.mlp.experts.{last}"):
        lora = LoRAModel.from_lora_tensors(1, saved(EXPERTS, pairs), helper(target))
        assert_unfolded(lora, parameter, pairs)


@pytest.mark.lab("1.6")
def test_rank_and_scaling_are_the_configs_for_the_parameter():
    tensors = {
        **saved(f"{EXPERTS}.base_layer", of_experts(GATE_UP, 2)),
        **saved(EXPERTS, of_experts(DOWN, 4)),
    }
    gate = {
        f"{PREFIX}model.layers.3.mlp.gate.lora_{side}.weight": torch.ones(1, 5).T
        if side == "B"
        else torch.ones(1, 5)
        for side in "AB"
    }
    config = helper(
        "experts.gate_up_proj",
        "experts.down_proj",
        "gate.weight",
        r=9,
        lora_alpha=6,
        use_rslora=True,
        rank_pattern={"gate_up_proj": 2, r"layers\.3\.mlp\.experts\.down_proj": 4, "gate.weight": 1},
        alpha_pattern={"down_proj": 10, "gate": 50, "experts": 50},
    )

    lora = LoRAModel.from_lora_tensors(1, {**tensors, **gate}, config)

    scalings = {name: weights.scaling for name, weights in lora.loras.items()}
    assert scalings == {GATE_UP: 6 / 2**0.5, DOWN: 10 / 4**0.5, "model.layers.3.mlp.gate": 6}


def test_other_tensors_stay_as_they_are():
    tensors = {
        **good_tensors(),
        f"{PREFIX}{EXPERTS}.0.down_proj.lora_A.weight": torch.ones(3, 7),
        f"{PREFIX}{EXPERTS}.0.down_proj.lora_B.weight": torch.ones(5, 3),
        f"{PREFIX}model.layers.3.mlp.shared_experts.down_proj.lora_A.weight": torch.ones(3, 9),
        f"{PREFIX}model.layers.3.mlp.shared_experts.down_proj.lora_B.weight": torch.ones(5, 3),
        f"{PREFIX}model.embed_tokens.base_layer.weight": torch.ones(2, 2),
    }

    lora = LoRAModel.from_lora_tensors(1, tensors, helper("down_proj"))

    read = {
        f"{PREFIX}{module}.lora_{side}.weight": tensor
        for module, weights in lora.loras.items()
        for side, tensor in (("A", weights.lora_a), ("B", weights.lora_b))
    }
    left_out = f"{PREFIX}model.embed_tokens.base_layer.weight"
    assert read.keys() == tensors.keys() - {left_out}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())


@pytest.mark.parametrize(
    ("place", "targets", "shape", "message"),
    [
        (EXPERTS, [], (12, 7), "of model.layers.3.mlp.experts target_parameters .* has none"),
        (EXPERTS, ["layers.2.mlp.experts.down_proj"], (12, 7), "has none"),
        (EXPERTS, ["proj", "n_proj", "experts"], (12, 7), "has none"),
        (f"{EXPERTS}.base_layer", ["down_proj"], (12, 7), "has only down_proj"),
        (
            f"{EXPERTS}.base_layer.base_layer",
            ["gate_up_proj", "down_proj"],
            (12, 7),
            "has only gate_up_proj and down_proj",
        ),
        (EXPERTS, ["down_proj"], (13, 7), r"\(13, 7\), expected rows for experts of rank 3 each"),
        (EXPERTS, ["down_proj"], (0, 7), r"\(0, 7\), expected rows"),
        (EXPERTS, ["down_proj"], (4, 3, 7), r"\(4, 3, 7\), expected rows"),
        (DOWN, ["down_proj"], (4, 3, 7), "read as PEFT saves them"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_name(place, targets, shape, message):
    name = f"{PREFIX}{place}.lora_A.weight"

    with pytest.raises(ValueError, match=message) as refusal:
        LoRAModel.from_lora_tensors(1, {name: torch.ones(shape)}, helper(*targets))

    assert name in str(refusal.value)


def test_a_tensor_for_several_experts_is_of_experts_alone():
    tensors = good_tensors()
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = tensors[name][None]

    with pytest.raises(ValueError, match="must be a matrix"):
        LoRAModel.from_lora_tensors(1, tensors, helper("down_proj"))
