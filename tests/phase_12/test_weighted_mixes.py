"""Several adapters as one: the weighted sum of their products, and what PEFT's `add_weighted_adapter` makes of them."""

import pytest
import torch
from torch import nn

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.mixes.weights import joined_ranks, mixed
from tests.oracles.backends import NaivePunica
from tests.worlds.linears import CHECKPOINT_SHAPES, ToyModel, random_pair, toy_adapter, wrap

pytestmark = pytest.mark.lab("12.5")

WEIGHTS = (0.7, -1.3, 2.0)


def part(seed, rank=3, width=12, height=10, name="o_proj"):
    """A and B, whose scaling is in B."""
    return LoRALayerWeights(name, rank, 6.0, *random_pair(width, rank, height, seed)).optimize()


def product(pair):
    return pair.lora_b.double() @ pair.lora_a.double()


def accepted(wrapped, seed, modules=None, rank=3):
    lora = toy_adapter(seed, modules, rank, adapter_id=seed)
    for weights in lora.loras.values():
        weights.optimize()
    wrapped.accept(lora)
    return lora


@pytest.fixture
def wrapped():
    return wrap(ToyModel(), NaivePunica(), max_lora_rank=12)


def slices(lora, wrapped):
    """What it adds: target -> B A, of every slice that it does not leave alone."""
    found = {}
    for name, weights in lora.loras.items():
        for target, own in zip(wrapped.modules[name].targets, weights.parts, strict=True):
            if own is not None:
                found[target] = product(own)
    return found


def assert_adds_up(mix, adapters, weights, wrapped):
    expected = {}
    for lora, weight in zip(adapters, weights):
        for target, own in slices(lora, wrapped).items():
            expected[target] = expected.get(target, 0) + weight * own
    found = slices(mix, wrapped)
    assert found.keys() == expected.keys()
    for target, own in found.items():
        torch.testing.assert_close(own, expected[target], msg=lambda said, target=target: f"{target}: {said}")


# ---- of one slice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(3,), (2, 5), (4, 1, 2)])
def test_a_pair_adds_what_all_add_each_times_its_weight(ranks):
    held = [(part(seed, rank), weight) for seed, (rank, weight) in enumerate(zip(ranks, WEIGHTS))]

    joined = joined_ranks("o_proj", held, 8)

    torch.testing.assert_close(product(joined), sum(weight * product(own) for own, weight in held))
    assert joined.rank == sum(ranks) == len(joined.lora_a) == joined.lora_b.shape[1]
    assert joined.scaling == 1 and joined.module_name == "o_proj", "B has all scaling in it"


def test_on_paper():
    """B A of the first is 2 · 3, of the second 5 · 1; weights 10 and -1."""
    pairs = [(2.0, 3.0), (5.0, 1.0)]
    held = [LoRALayerWeights("m", 1, 1, torch.tensor([[a]]), torch.tensor([[b]])) for b, a in pairs]

    joined = joined_ranks("m", list(zip(held, (10.0, -1.0))), 2)

    assert product(joined).tolist() == [[55.0]]


@pytest.mark.parametrize("weights", [(0.7, -0.3), (1.0, 1.0), (0.0, 2.5)])
def test_it_is_the_adapter_that_peft_makes_of_them(weights):
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(nn.Linear(12, 10, bias=False))
    base[0].weight.data.zero_()
    config = [LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"]) for rank in (3, 2)]
    model = get_peft_model(base, config[0], adapter_name="sql")
    model.add_adapter("json", config[1])
    layer, held = model.base_model.model[0], []
    for seed, (name, weight) in enumerate(zip(("sql", "json"), weights)):
        lora_a, lora_b = random_pair(12, 3 - seed, 10, seed, torch.float32)
        layer.lora_A[name].weight.data, layer.lora_B[name].weight.data = lora_a.clone(), lora_b.clone()
        held.append((LoRALayerWeights("0", 3 - seed, 6 - 2 * seed, lora_a, lora_b).optimize(), weight))
    model.add_weighted_adapter(["sql", "json"], list(weights), "mix", combination_type="cat")
    expected = layer.get_delta_weight("mix").double()

    torch.testing.assert_close(product(joined_ranks("0", held, 8)), expected, rtol=1e-5, atol=1e-5)


def test_ranks_that_are_too_large_together_are_refused_with_the_option():
    held = [(part(1, 3), 1.0), (part(2, 4), 1.0)]

    assert joined_ranks("o_proj", held, 7).rank == 7
    with pytest.raises(ValueError, match=r"o_proj .*max_lora_rank 6"):
        joined_ranks("o_proj", held, 6)


def test_weights_that_make_a_number_infinite_are_refused():
    own = part(1)
    own.lora_b[2, 1] = 1e200

    with pytest.raises(ValueError, match="o_proj"):
        joined_ranks("o_proj", [(own, 1e200)], 8)


def test_of_nothing_there_is_none():
    assert joined_ranks("o_proj", [], 8) is None


def test_the_parts_stay_as_they_are():
    own, other = part(1), part(2)
    before = [tensor.clone() for tensor in (own.lora_a, own.lora_b, other.lora_a, other.lora_b)]

    joined = joined_ranks("o_proj", [(own, 0.5)], 8), joined_ranks("o_proj", [(own, 2.0), (other, 3.0)], 8)
    for pair in joined:
        pair.lora_a.fill_(9)
        pair.lora_b.fill_(9)

    assert all(map(torch.equal, before, (own.lora_a, own.lora_b, other.lora_a, other.lora_b)))


def test_shapes_alone_give_shapes():
    held = [(part(seed, rank), 2.0) for seed, rank in ((1, 3), (2, 4))]
    for own, _ in held:
        own.lora_a, own.lora_b = own.lora_a.to("meta"), own.lora_b.to("meta")

    joined = joined_ranks("o_proj", held, 8)

    assert (joined.rank, joined.lora_a.shape, joined.lora_b.shape) == (7, (7, 12), (10, 7))
    assert joined.lora_b.is_meta


# ---- of whole adapters ----------------------------------------------------------------------------------------------


def test_a_mix_adds_what_its_parts_add_in_every_module(wrapped):
    adapters = [accepted(wrapped, seed, rank=rank) for seed, rank in ((1, 3), (2, 2), (3, 4))]

    mix = mixed(77, adapters, WEIGHTS, wrapped)

    assert_adds_up(mix, adapters, WEIGHTS, wrapped)
    assert mix.id == 77 and mix.is_accepted
    assert mix.rank == 9
    for name, weights in mix.loras.items():
        accepted_too = adapters[0].loras[name]
        assert weights.is_packed == accepted_too.is_packed, f"{name} has not the form of an accepted adapter"


def test_modules_and_slices_that_some_leave_alone_are_the_others(wrapped):
    names = list(CHECKPOINT_SHAPES)
    adapters = [
        accepted(wrapped, 1, ["attn.q_proj", "attn.v_proj", "mlp.down_proj"]),
        accepted(wrapped, 2, ["attn.v_proj", "router"], rank=5),
        accepted(wrapped, 3, names[-1:], rank=2),
    ]

    mix = mixed(1, adapters, WEIGHTS, wrapped)

    assert_adds_up(mix, adapters, WEIGHTS, wrapped)
    ranks = {name: [own and own.rank for own in weights.parts] for name, weights in mix.loras.items()}
    assert ranks["layers.0.attn.qkv_proj"] == [3, None, 8], "nobody has anything for k"
    assert mix.loras["layers.0.attn.qkv_proj"].rank == 8 == mix.rank


def test_a_mix_of_one_is_that_adapter_times_its_weight(wrapped):
    adapter = accepted(wrapped, 1)

    assert_adds_up(mixed(5, [adapter], [-0.5], wrapped), [adapter], [-0.5], wrapped)


def test_an_adapter_that_was_only_judged_is_mixed_too(wrapped):
    """Its parts are by checkpoint names, and not by modules."""
    first, second = accepted(wrapped, 1), toy_adapter(2, adapter_id=2)
    for weights in second.loras.values():
        weights.optimize()

    mix = mixed(3, [first, second], (0.5, 4.0), wrapped)

    other = accepted(wrapped, 2)
    assert_adds_up(mix, [first, other], (0.5, 4.0), wrapped)


def test_ranks_above_the_engines_are_refused_with_the_module(wrapped):
    adapters = [accepted(wrapped, seed, ["attn.q_proj", "mlp.down_proj"], rank=7) for seed in (1, 2)]

    with pytest.raises(ValueError, match=r"layers\.0\..* 14.*max_lora_rank 12"):
        mixed(3, adapters, (1.0, 1.0), wrapped)


def test_as_many_weights_as_adapters_are_wanted(wrapped):
    with pytest.raises(ValueError):
        mixed(3, [accepted(wrapped, 1)], (1.0, 2.0), wrapped)


def test_a_slot_takes_it_like_any_other(wrapped):
    adapters = [accepted(wrapped, 1, ["attn.o_proj"]), accepted(wrapped, 2, ["attn.o_proj"], rank=2)]
    mix = mixed(3, adapters, (2.0, 0.5), wrapped)

    assert isinstance(mix, LoRAModel)
    wrapped.write(mix, 1)

    slots = wrapped.modules["layers.0.attn.o_proj"].slots
    expected = 2.0 * product(adapters[0].loras["layers.0.attn.o_proj"])
    expected = expected + 0.5 * product(adapters[1].loras["layers.0.attn.o_proj"])
    torch.testing.assert_close(slots.b[0][1, 0] @ slots.a[0][1, 0], expected)
