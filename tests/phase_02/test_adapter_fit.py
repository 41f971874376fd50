"""An adapter that does not fit the model is refused before anything changes (lab 2.6)."""

import pytest
import torch
from torch import nn

from minivllm.layers.fused_moe import FusedMoE
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from tests.oracles.backends import NaivePunica
from tests.worlds.linears import ToyModel, random_pair, toy_adapter, wrap


def adapter_of(shapes):
    """An adapter with the given modules: name -> (shape of A, shape of B)."""
    loras = {}
    for seed, (name, ((rank, width), (output, b_rank))) in enumerate(shapes.items()):
        lora_a, lora_b = (
            random_pair(width, rank, output, seed)[0],
            random_pair(width, b_rank, output, seed)[1],
        )
        loras[name] = LoRALayerWeights(name, rank, 1, lora_a, lora_b)
    return LoRAModel(1, 8, loras)


@pytest.fixture
def wrapped():
    return wrap(ToyModel(), NaivePunica())


def assert_refused(wrapped, lora, *said):
    """It raises ValueError with all these words in its message, and changes nothing."""
    before = {name: (weights, weights.scaling) for name, weights in lora.loras.items()}

    try:
        wrapped.accept(lora)
    except ValueError as error:
        missing = [str(text) for text in said if str(text) not in str(error)]
        assert not missing, f"the message does not name {missing}: {error}"
    else:
        shapes = {n: (tuple(w.lora_a.shape), tuple(w.lora_b.shape)) for n, w in lora.loras.items()}
        raise AssertionError(f"it was taken for fitting, with A and B of {shapes}; expected a ValueError")
    after = {name: (weights, weights.scaling) for name, weights in lora.loras.items()}
    assert after == before, "the adapter has changed"
    assert not lora.is_accepted, "it was refused, and says that it was accepted"
    assert all(not any(slots) for module in wrapped.modules.values() for slots in module.slots.live_ranks)


@pytest.mark.lab("2.6")
@pytest.mark.parametrize("modules", [None, ["attn.q_proj"], ["mlp.up_proj", "router"], ["attn.o_proj"]])
def test_an_adapter_for_any_part_of_the_model_fits(wrapped, modules):
    wrapped.accept(toy_adapter(seed=1, modules=modules))


@pytest.mark.lab("2.6")
def test_ranks_may_differ_by_module_up_to_the_largest(wrapped):
    shapes = {
        "layers.0.attn.q_proj": ((8, 12), (16, 8)),
        "layers.0.attn.k_proj": ((1, 12), (8, 1)),
        "layers.1.router": ((5, 12), (3, 5)),
    }

    wrapped.accept(adapter_of(shapes))


@pytest.mark.lab("2.7")
def test_an_accepted_adapter_fits_again_and_is_left_alone(wrapped):
    lora = toy_adapter(seed=1)
    wrapped.accept(lora)
    accepted = dict(lora.loras)

    wrapped.accept(lora)

    assert lora.loras == accepted


@pytest.mark.lab("2.7")
def test_one_unknown_module_among_many_is_enough(wrapped):
    """INCIDENTS 8: the others would be served, this one lost."""
    lora = toy_adapter(seed=1)
    lora.loras["layers.0.mlp.w1"] = lora.loras["layers.0.router"]

    assert_refused(wrapped, lora, "'layers.0.mlp.w1'")


@pytest.mark.lab("2.7")
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["layers.0.router", "layers.0.attn.out_proj"],
            ["'layers.0.attn.out_proj' (nearest: ", "layers.0.attn.o_proj"],
        ),
        (
            ["layers.0.router", "layers.2.attn.q_proj"],
            ["'layers.2.attn.q_proj' (nearest: ", "layers.1.attn.q_proj"],
        ),
        (
            ["model.layers.1.mlp.down_proj"],
            ["'model.layers.1.mlp.down_proj' (nearest: ", "layers.1.mlp.down_proj"],
        ),
        (["layers.0.mlp.w1_up_proj"], ["'layers.0.mlp.w1_up_proj' (nearest: ", "layers.0.mlp.up_proj"]),
        (["zzz"], ["'zzz'"]),
        (["lm_head"], ["'lm_head'"]),
        (
            [f"transformer.h.{i}.c_attn" for i in range(9)],
            ["'transformer.h.0.c_attn'", "'transformer.h.3.c_attn'", "and 5 more"],
        ),
    ],
    ids=lambda texts: texts[0],
)
def test_a_module_that_is_not_there_is_named_with_the_nearest_ones(wrapped, names, said):
    lora = adapter_of(dict.fromkeys(names, ((2, 12), (3, 2))))

    assert_refused(wrapped, lora, *said)


@pytest.mark.lab("2.7")
def test_a_module_that_the_server_does_not_wrap_is_refused_with_the_reason():
    wrapped = wrap(ToyModel(), NaivePunica(), target_modules=["o_proj", "q_proj"])

    wrapped.accept(toy_adapter(seed=1, modules=["attn.q_proj", "attn.o_proj"]))
    assert_refused(
        wrapped,
        toy_adapter(seed=1, modules=["attn.q_proj", "mlp.up_proj"]),
        "'layers.0.mlp.up_proj'",
        "the engine wraps only target_modules=['o_proj', 'q_proj']",
    )


@pytest.mark.lab("2.6")
@pytest.mark.parametrize("height", [31, 33])
def test_an_adapter_for_a_whole_fused_module_is_as_tall_as_all_its_parts(wrapped, height):
    lora = adapter_of({"layers.0.attn.qkv_proj": ((2, 12), (height, 2))})

    assert_refused(wrapped, lora, "layers.0.attn.qkv_proj", (height, 2), (32, 2))


@pytest.mark.lab("2.6")
def test_an_adapter_for_a_whole_fused_module_and_a_part_of_it_is_refused(wrapped):
    whole, part = "layers.0.attn.qkv_proj", "layers.0.attn.k_proj"
    lora = adapter_of({whole: ((2, 12), (32, 2)), part: ((2, 12), (8, 2))})

    assert_refused(wrapped, lora, whole, part, "give either")


@pytest.mark.lab("2.6")
def test_an_adapter_for_a_whole_fused_module_becomes_one_for_each_part(wrapped):
    name = "layers.0.attn.qkv_proj"
    lora = adapter_of({name: ((2, 12), (32, 2))})
    lora_a, lora_b = lora.loras[name].lora_a, lora.loras[name].lora_b

    wrapped.accept(lora)

    parts = lora.loras[name].parts
    assert all(torch.equal(part.lora_a, lora_a) for part in parts)
    assert torch.equal(torch.cat([part.lora_b for part in parts]), lora_b / 2)


@pytest.mark.lab("2.6")
@pytest.mark.parametrize(
    ("module", "shape_a", "shape_b", "expected"),
    [
        ("attn.o_proj", (3, 12), (12, 3), ((3, 16), (12, 3))),
        ("attn.o_proj", (3, 16), (16, 3), ((3, 16), (12, 3))),
        ("attn.k_proj", (3, 12), (16, 3), ((3, 12), (8, 3))),
        ("attn.q_proj", (3, 12), (8, 3), ((3, 12), (16, 3))),
        ("mlp.up_proj", (3, 12), (20, 3), ((3, 12), (10, 3))),
        ("router", (3, 12), (3, 2), ((3, 12), (3, 3))),
        ("router", (3, 1), (3, 3), ((3, 12), (3, 3))),
        ("router", (3, 12), (1, 3), ((3, 12), (3, 3))),
        # On its side, with as many numbers.
        ("attn.o_proj", (3, 16), (3, 12), ((3, 16), (12, 3))),
        ("attn.k_proj", (2, 12), (2, 8), ((2, 12), (8, 2))),
        # A's rank and B's differ.
        ("attn.o_proj", (3, 16), (12, 4), ((3, 16), (12, 3))),
    ],
)
def test_shapes_that_do_not_fit_are_named_with_the_right_ones(wrapped, module, shape_a, shape_b, expected):
    name = f"layers.1.{module}"

    lora = adapter_of({"layers.0.router": ((2, 12), (3, 2)), name: (shape_a, shape_b)})

    assert_refused(wrapped, lora, name, shape_a, shape_b, *expected)


@pytest.mark.lab("2.6")
@pytest.mark.parametrize("height", [8, 16])
def test_shapes_alone_are_judged_too(wrapped, height):
    """On the device "meta", as when a request is checked before its adapter is read."""
    name = "layers.0.attn.k_proj"
    lora = adapter_of({name: ((2, 12), (height, 2))})
    lora.loras[name].replace_tensors(lambda tensor: tensor.to("meta"))

    if height == 8:
        wrapped.accept(lora)
    else:
        assert_refused(wrapped, lora, name, (16, 2), (8, 2))


class ExpertsAlone(nn.Module):
    supports_lora = True
    expert_params_mapping = ("w1", "w2", "w3")

    def __init__(self):
        super().__init__()
        self.experts = FusedMoE(3, 2, 12, 20, params_dtype=torch.float64)


@pytest.mark.lab("2.6")
@pytest.mark.parametrize("part", ["0.w1", "0.w3", "1.w1", "1.w2", "2.w3"])
def test_every_part_of_every_expert_is_judged(part):
    """A layer of experts has 3 slices, and an adapter 3 parts for each of its experts."""
    wrapped = wrap(ExpertsAlone(), NaivePunica())
    fitting = {
        f"experts.{expert}.{name}": ((2, width), (height, 2))
        for expert in range(3)
        for name, width, height in (("w1", 12, 20), ("w2", 20, 12), ("w3", 12, 20))
    }
    (_, width), (height, _) = fitting[f"experts.{part}"]

    wrapped.accept(adapter_of(fitting))
    misfit = adapter_of({**fitting, f"experts.{part}": ((2, 99), (height, 2))})

    assert_refused(wrapped, misfit, f"experts.{part}", (2, 99), (2, width))


@pytest.mark.lab("2.6")
@pytest.mark.parametrize("module", ["attn.o_proj", "attn.v_proj"])
def test_what_a_layer_has_no_room_for_beside_a_and_b_is_refused(wrapped, module):
    """A bias would be lost in silence: this engine was started without --enable-lora-bias."""
    name = f"layers.1.{module}"
    lora = toy_adapter(seed=1, modules=[module])
    lora.loras = {name: lora.loras.pop(f"layers.0.{module}")}
    lora.loras[name].module_name = name
    lora.loras[name].beside = {"bias": torch.ones(1, len(lora.loras[name].lora_b))}

    assert_refused(wrapped, lora, name, "bias")


@pytest.mark.lab("2.7")
def test_an_adapter_that_was_judged_is_as_it_was(wrapped):
    name = "layers.0.attn.qkv_proj"
    lora = adapter_of({name: ((2, 12), (32, 2)), "layers.1.router": ((2, 12), (3, 2))})
    before = {module: (weights, weights.lora_b, weights.scaling) for module, weights in lora.loras.items()}

    judged = wrapped.judge(lora)

    after = {module: (weights, weights.lora_b, weights.scaling) for module, weights in lora.loras.items()}
    assert {module: len(parts) for module, parts in judged.items()} == {name: 3, "layers.1.router": 1}
    assert after == before and not lora.is_accepted


@pytest.mark.lab("2.7")
def test_an_adapter_of_which_one_module_does_not_fit_is_left_as_it_was(wrapped):
    lora = adapter_of({"layers.0.router": ((2, 12), (3, 2)), "layers.1.router": ((2, 12), (4, 2))})

    assert_refused(wrapped, lora, "layers.1.router")


@pytest.mark.lab("2.6")
def test_a_rank_above_the_largest_is_refused_with_the_fix(wrapped):
    lora = adapter_of({"layers.0.router": ((2, 12), (3, 2)), "layers.1.router": ((9, 12), (3, 9))})

    assert_refused(
        wrapped,
        lora,
        "layers.1.router",
        "8",
        "--max-lora-rank 9",
    )
