"""Whole adapters: packed once when they come, written into one slot of every layer (lab 2.7)."""

import pytest
import torch

from minivllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from minivllm.lora.extensions import WrappedOption
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.memory_stats import slot_bytes
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.oracles.backends import NaivePunica
from tests.oracles.rows import assert_rows_equal
from tests.worlds.linears import (
    CHECKPOINT_SHAPES,
    DTYPE,
    FUSED,
    HIDDEN,
    SharingModel,
    ToyModel,
    random_pair,
    targets_of,
    toy_adapter,
    wrap,
)


@pytest.fixture
def wrapped():
    return wrap(ToyModel(), NaivePunica())


def packed(wrapped, lora):
    wrapped.accept(lora)
    return lora


def products(wrapped, slot):
    """What every slice of every layer has in a slot: name a checkpoint gives it -> B · A."""
    found = {}
    for target, (name, i) in targets_of(wrapped).items():
        module = wrapped.modules[name]
        found[target] = module.lora_b_stacked[i][slot, 0] @ module.lora_a_stacked[i][slot, 0]
    return found


def expected_products(wrapped, lora, scaling):
    """The same from the definition, before packing; zeros where the adapter has nothing."""
    expected = {}
    for target, (name, i) in targets_of(wrapped).items():
        module = wrapped.modules[name]
        expected[target] = torch.zeros(module.output_slices[i], module.input_size, dtype=torch.float64)
        if (weights := lora.get_lora(target)) is not None:
            expected[target] = scaling * weights.lora_b @ weights.lora_a
    return expected


def assert_same_products(actual, expected):
    assert actual.keys() == expected.keys()
    for name, product in expected.items():
        assert_rows_equal(
            actual[name], product, tolerance=1e-12, what=f"B @ A that the slot holds for {name}"
        )


def holding(wrapped, slot):
    """Names of the layers that have anything in a slot."""
    return [
        name
        for name, module in wrapped.modules.items()
        if any(ranks[slot] for ranks in module.slots.live_ranks)
        or any(buffer[slot].any() for buffer in (*module.lora_a_stacked, *module.lora_b_stacked))
    ]


def assert_empty(wrapped, slot):
    left = holding(wrapped, slot)
    assert not left, f"slot {slot} must be empty in every layer, and is not in {left}"


def test_packing_leaves_one_entry_for_each_wrapped_module(wrapped):
    lora = toy_adapter(seed=1)

    wrapped.accept(lora)

    assert lora.loras.keys() == {f"layers.0.{name}" for name in FUSED}
    assert {name for name, weights in lora.loras.items() if weights.is_packed} == {
        "layers.0.attn.qkv_proj",
        "layers.0.mlp.gate_up_proj",
    }


def test_packing_folds_the_scaling_once_however_often_it_is_done(wrapped):
    lora = toy_adapter(seed=1, rank=3, alpha=6.0)
    expected = expected_products(wrapped, lora, scaling=2.0)

    wrapped.accept(lora)
    wrapped.accept(lora)
    wrapped.accept(lora.clone(2))
    wrapped.write(lora, 0)

    assert_same_products(products(wrapped, 0), expected)


@pytest.mark.lab("2.7")
@pytest.mark.parametrize("rank", [0, 1])
def test_of_processes_that_share_a_layer_each_packs_its_share_of_what_fits_the_whole(rank):
    """Half of gate's rows, and half of down's columns. The other layers are alone."""
    model, tp = ToyModel(num_layers=1), TensorParallel(rank, 2)
    mlp = model.layers[0].mlp
    mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [10, 10], params_dtype=DTYPE, tp=tp)
    mlp.down_proj = RowParallelLinear(10, HIDDEN, params_dtype=DTYPE, tp=tp)
    wrapped, lora = wrap(model, NaivePunica()), toy_adapter(seed=1, rank=3, alpha=6.0)
    gate, down, router = (
        2.0 * lora.loras[f"layers.0.{name}"].lora_b @ lora.loras[f"layers.0.{name}"].lora_a
        for name in ("mlp.gate_proj", "mlp.down_proj", "router")
    )

    wrapped.accept(lora)
    wrapped.write(lora, 1)

    own = slice(5 * rank, 5 * rank + 5)
    expected = {"mlp.gate_up_proj": gate[own], "mlp.down_proj": down[:, own], "router": router}
    for name, product in expected.items():
        layer = wrapped.modules[f"layers.0.{name}"]
        held = layer.lora_b_stacked[0][1, 0] @ layer.lora_a_stacked[0][1, 0]
        assert_rows_equal(held, product, tolerance=1e-12, what=f"B @ A of process {rank} for {name}")


@pytest.mark.lab("2.7")
def test_what_an_option_found_of_the_whole_adapter_goes_to_the_layers(wrapped):
    """Once: what was given is no longer beside the adapter, and what nobody takes stays there."""
    lora, given = toy_adapter(seed=1, modules=["attn.o_proj"]), []
    lora.beside = {"tokens": "some tokens", "others": "for somebody else"}
    router = toy_adapter(seed=2, modules=["router"]).loras["layers.0.router"]

    class Tokens(WrappedOption):
        def judge(self, adapter, found):
            given.append((adapter.beside["tokens"], sorted(found)))
            found["layers.0.router"] = {"layers.0.router": router}

        def accepted(self, adapter):
            del adapter.beside["tokens"]

    wrapped.options.append(Tokens())
    wrapped.accept(lora)
    wrapped.accept(lora)

    assert given == [("some tokens", ["layers.0.attn.o_proj"])]
    assert lora.loras.keys() == {"layers.0.attn.o_proj", "layers.0.router"}, "what was given has no layer"
    assert lora.beside == {"others": "for somebody else"}


@pytest.mark.lab("2.7")
def test_an_adapter_that_is_refused_keeps_what_options_found(wrapped):
    lora = toy_adapter(seed=1, modules=["attn.o_proj"])
    weights = lora.loras["layers.0.attn.o_proj"]
    weights.lora_b = weights.lora_b.t()
    lora.beside = {"tokens": "some tokens"}

    class Tokens(WrappedOption):
        def accepted(self, adapter):
            del adapter.beside["tokens"]

    wrapped.options.append(Tokens())

    for _ in range(2):  # it is no better when it is tried again
        with pytest.raises(ValueError, match=r"layers\.0\.attn\.o_proj"):
            wrapped.accept(lora)

    assert lora.beside == {"tokens": "some tokens"}
    assert not lora.is_accepted


@pytest.mark.lab("2.7")
@pytest.mark.parametrize("slot", range(3))
def test_an_adapter_is_written_to_its_slot_of_every_layer_and_no_other(wrapped, slot):
    lora = toy_adapter(seed=3)
    expected = expected_products(wrapped, lora, scaling=2.0)

    wrapped.write(packed(wrapped, lora), slot)

    assert_same_products(products(wrapped, slot), expected)
    for other in {0, 1, 2} - {slot}:
        assert_empty(wrapped, other)


@pytest.mark.lab("2.7")
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "failing", [f"layers.0.{name}" for name in ("attn.qkv_proj", "mlp.down_proj", "adaptor")]
)
def test_a_copy_that_fails_on_the_way_leaves_the_slot_empty_and_the_others_alone(
    wrapped, failing, error, monkeypatch
):
    """INCIDENTS 4, at the level of layers."""
    neighbour = toy_adapter(seed=1)
    expected = expected_products(wrapped, neighbour, scaling=2.0)
    wrapped.write(packed(wrapped, neighbour), 0)
    wrapped.write(packed(wrapped, toy_adapter(seed=2, rank=8)), 1)

    def fail(*args):
        raise error

    monkeypatch.setattr(wrapped.modules[failing], "write", fail)
    with pytest.raises(type(error)):
        wrapped.write(packed(wrapped, toy_adapter(seed=3)), 1)

    assert_empty(wrapped, 1)
    assert_same_products(products(wrapped, 0), expected)


@pytest.mark.lab("2.7")
def test_a_copy_that_fails_within_a_layer_leaves_the_slot_empty(wrapped):
    """The first slices of the layer have been written when the last one does not fit."""
    lora = packed(wrapped, toy_adapter(seed=3))
    lora.loras["layers.0.attn.qkv_proj"].parts[2].lora_b = random_pair(1, 3, 99, seed=4)[1]

    with pytest.raises(RuntimeError, match="size of tensor"):
        wrapped.write(lora, 1)

    assert_empty(wrapped, 1)


@pytest.mark.lab("2.7")
def test_an_adapter_that_memory_was_too_short_to_pack_can_be_accepted_again(wrapped, monkeypatch):
    """Promised: `loras` keeps its names until all layers have packed. Half of them by the modules' names would be taken
    for what the adapter has, and q_proj, k_proj and v_proj be served as the base model has them.
    """
    lora, names = toy_adapter(seed=3), set(toy_adapter(seed=3).loras)

    def out_of_memory(parts):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(wrapped.modules["layers.0.mlp.down_proj"], "pack", out_of_memory)
        with pytest.raises(MemoryError):
            wrapped.accept(lora)

    assert (set(lora.loras), lora.is_accepted) == (names, False)
    wrapped.accept(lora)
    wrapped.write(lora, 1)
    assert_same_products(products(wrapped, 1), expected_products(wrapped, toy_adapter(seed=3), scaling=2.0))


@pytest.mark.lab("2.7")
def test_any_history_of_adapters_leaves_in_each_slot_what_came_last(wrapped):
    generator = torch.Generator().manual_seed(5)
    names = list(CHECKPOINT_SHAPES)
    expected = {}

    for seed in range(40):
        slot = int(torch.randint(3, (), generator=generator))
        rank = int(torch.randint(1, 9, (), generator=generator))
        chosen = [name for name in names if torch.rand((), generator=generator) < 0.4] or names
        lora = toy_adapter(seed, chosen, rank=rank, alpha=3.0)
        expected[slot] = expected_products(wrapped, lora, scaling=3.0 / rank)
        wrapped.write(packed(wrapped, lora), slot)

        for held, wanted in expected.items():
            assert_same_products(products(wrapped, held), wanted)


def sharing_adapter(names):
    weights = random_pair(12, 2, 3, seed=1)
    return LoRAModel(1, 2, {name: LoRALayerWeights(name, 2, 2.0, *weights) for name in names})


@pytest.mark.lab("2.7")
@pytest.mark.parametrize(
    "names", [["layers.1.router"], ["layers.1.runner.gate"], ["layers.1.router", "layers.1.runner.gate"]]
)
def test_a_shared_module_keeps_its_weights_whichever_of_its_names_the_adapter_uses(names):
    wrapped = wrap(SharingModel(), NaivePunica())
    lora_a, lora_b = random_pair(12, 2, 3, seed=1)

    wrapped.write(packed(wrapped, sharing_adapter(names)), 1)

    router = wrapped.modules["layers.1.router"]
    assert router.slots.live_ranks == [[0, 2, 0]]
    product = router.lora_b_stacked[0][1, 0] @ router.lora_a_stacked[0][1, 0]
    assert_rows_equal(product, lora_b @ lora_a, what="B @ A that the slot holds for the shared router")


def test_a_dummy_adapter_targets_everything_and_changes_nothing(wrapped):
    dummy = wrapped.dummy(5, rank=4)

    assert (dummy.id, dummy.rank) == (5, 4)
    assert dummy.loras.keys() == targets_of(wrapped).keys()
    wrapped.accept(dummy)
    wrapped.write(packed(wrapped, dummy), 0)
    assert not any(product.any() for product in products(wrapped, 0).values())
    assert {ranks[0] for module in wrapped.modules.values() for ranks in module.slots.live_ranks} == {4}


def test_slot_bytes_are_those_of_one_slot_in_every_layer():
    wrapped = wrap(SharingModel(), NaivePunica(), max_lora_rank=5)

    shapes = {
        **{f"0.{name}": shape for name, shape in CHECKPOINT_SHAPES.items()},
        **{f"1.{name}": shape for name, shape in CHECKPOINT_SHAPES.items() if "mlp" not in name},
    }
    assert slot_bytes(wrapped) == 3 * sum(8 * 5 * (width + output) for width, output in shapes.values())
