"""Which wrapper takes which linear, and wrapping a whole model (lab 2.5)."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import minivllm.lora.wrapping as wrapping
from minivllm.config import LoRAConfig
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.extensions import AdapterOption, LoRAExtensions
from minivllm.vllm.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from minivllm.vllm.utils import from_layer, get_supported_lora_modules, replace_submodule
from tests.oracles.backends import NaivePunica
from tests.oracles.rows import assert_rows_equal
from tests.worlds.linears import (
    FUSED,
    HIDDEN,
    SharingModel,
    ToyModel,
    random_pair,
    randomize,
    targets_of,
    wrap,
)

CONFIG = LoRAConfig(max_lora_rank=4, max_loras=2)
WRAPPERS = [
    ColumnParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
]


class SpecialLinear(ColumnParallelLinear):
    """Some model's own linear, whose forward may do anything."""


class SpecialMerged(MergedColumnParallelLinear):
    """Likewise, of two parts."""


class WrapsTwoKinds(ColumnParallelLinearWithLoRA):
    """A wrapper that takes one kind of linear whole and another in two parts."""

    wraps: ClassVar = {QKVParallelLinear: 1, MergedColumnParallelLinear: 2}


# Base linear, what the checkpoint calls its parts -> the one wrapper that takes it.
TAKEN_BY = [
    (ColumnParallelLinear(4, 6), [], ColumnParallelLinearWithLoRA),
    (RowParallelLinear(4, 6), [], RowParallelLinearWithLoRA),
    (ReplicatedLinear(4, 6), [], ReplicatedLinearWithLoRA),
    (MergedColumnParallelLinear(4, [3, 3]), [], None),
    (MergedColumnParallelLinear(4, [3, 3]), ["gate_up"], ColumnParallelLinearWithLoRA),
    (MergedColumnParallelLinear(4, [3, 3]), ["gate", "up"], MergedColumnParallelLinearWithLoRA),
    (QKVParallelLinear(4, 2, 2, 1), [], None),
    (QKVParallelLinear(4, 2, 2, 1), ["qkv"], QKVParallelLinearWithLoRA),
    (QKVParallelLinear(4, 2, 2, 1), ["q", "kv"], None),
    (QKVParallelLinear(4, 2, 2, 1), ["q", "k", "v"], MergedQKVParallelLinearWithLoRA),
    (SpecialLinear(4, 6), [], None),
    (SpecialMerged(4, [3, 3]), ["gate", "up"], MergedColumnParallelLinearWithLoRA),
    (VocabParallelEmbedding(4, 6), [], VocabParallelEmbeddingWithLoRA),
    (ParallelLMHead(6, 4), [], None),
    (nn.Linear(4, 6), [], None),
]
IDS = [f"{type(layer).__name__}-{len(parts)}" for layer, parts, _ in TAKEN_BY]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("layer", "parts", "taken_by"), TAKEN_BY, ids=IDS)
def test_a_wrapper_takes_its_own_linear_with_its_number_of_parts(layer, parts, taken_by, wrapper):
    answer = wrapper.can_replace_layer(
        source_layer=layer, lora_config=CONFIG, packed_modules_list=parts, model_config=None
    )

    assert answer == (wrapper is taken_by), (
        f"{wrapper.__name__} for {type(layer).__name__}, which the checkpoint calls {parts}: {answer}"
    )


@pytest.mark.parametrize(
    ("wrapper", "base", "slices"),
    [
        (MergedColumnParallelLinearWithLoRA, MergedColumnParallelLinear(4, [5, 2]), (5, 2)),
        (MergedQKVParallelLinearWithLoRA, QKVParallelLinear(4, 3, 4, 2), (12, 6, 6)),
        (QKVParallelLinearWithLoRA, QKVParallelLinear(4, 3, 4, 2), (24,)),
        (ColumnParallelLinearWithLoRA, MergedColumnParallelLinear(4, [5, 2]), (7,)),
        (RowParallelLinearWithLoRA, RowParallelLinear(4, 6), (6,)),
        (MergedColumnParallelLinearWithLoRA, SpecialMerged(4, [5, 2]), (5, 2)),
        (WrapsTwoKinds, MergedColumnParallelLinear(4, [5, 2]), (5, 2)),
        (WrapsTwoKinds, QKVParallelLinear(4, 3, 4, 2), (24,)),
        (WrapsTwoKinds, ReplicatedLinear(4, 6), (6,)),
    ],
)
def test_a_linear_has_one_slice_for_each_adapter(wrapper, base, slices):
    layer = wrapper(base)

    assert layer.output_slices == slices, "widths of the slices"
    assert layer.n_slices == len(slices)


@pytest.mark.parametrize(
    ("wrapper", "widths"),
    [(MergedQKVParallelLinearWithLoRA, [12, 6, 6]), (QKVParallelLinearWithLoRA, [24])],
)
def test_a_row_gets_the_adapter_of_each_part_in_that_parts_columns(wrapper, widths):
    """Grouped heads: k and v are half as wide as q."""
    layer = wrapper(QKVParallelLinear(HIDDEN, 3, 4, 2, params_dtype=torch.float64))
    randomize(layer, seed=1)
    layer.create_lora_weights(2, CONFIG)
    layer.set_mapping(NaivePunica([1, -1]))
    pairs = [random_pair(HIDDEN, i + 2, width, seed=2 + i) for i, width in enumerate(widths)]
    x = random_pair(HIDDEN, 2, 1, seed=5)[0]  # (2, HIDDEN)

    layer.set_lora(1, [a for a, _ in pairs], [b for _, b in pairs])
    y, _ = layer(x)

    added = torch.cat([b @ (a @ x[0]) for a, b in pairs])
    expected = x @ layer.weight.T + layer.bias + torch.stack([added, torch.zeros(24)])
    labels = ["the adapter in slot 1", "the base model"]
    assert_rows_equal(y, expected, labels=labels, tolerance=1e-12, what="outputs, q then k then v")


@pytest.mark.parametrize(("layer", "parts", "taken_by"), TAKEN_BY, ids=IDS)
def test_a_layer_gets_its_wrapper_with_slots_or_stays_what_it_is(layer, parts, taken_by):
    wrapped = from_layer(layer, 2, CONFIG, parts)

    if taken_by is None:
        assert wrapped is layer, f"nobody takes it, so it must come back; what came back is {wrapped!r}"
    else:
        assert type(wrapped) is taken_by
        assert wrapped.base_layer is layer
        assert hasattr(wrapped, "lora_a_stacked"), "the layer has no slots"
        assert {buffer.shape[0] for buffer in wrapped.slots.a} == {2}


class Greedy(RowParallelLinearWithLoRA):
    """A wrapper that an option plugs in, and that takes whatever is a linear."""

    @classmethod
    def takes(cls, layer, parts):
        return isinstance(layer, nn.Module) and hasattr(layer, "output_size")


class Greedier(Greedy):
    """Another one, plugged in after it."""


class TwoWrappers(AdapterOption):
    wrappers = (Greedy, Greedier)


def test_options_are_asked_in_their_order_for_what_no_plain_wrapper_takes():
    extensions = LoRAExtensions(options=(TwoWrappers(),))

    kinds = [
        type(wrapping.from_layer(layer, 2, CONFIG, [], extensions=extensions))
        for layer in (RowParallelLinear(4, 6), SpecialLinear(4, 6))
    ]

    assert kinds == [RowParallelLinearWithLoRA, Greedy]


@pytest.mark.parametrize("name", ["layers.1.attn.o_proj", "layers.0", "lm_head"])
def test_a_submodule_is_replaced_where_it_is(name):
    model, new = ToyModel(), nn.Identity()
    others = {n: m for n, m in model.named_modules() if not (n + ".").startswith(name + ".") and n}

    answer = replace_submodule(model, name, new)

    assert answer is new
    assert model.get_submodule(name) is new
    assert {n: model.get_submodule(n) for n in others} == others


def test_replacing_what_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="nowhere"):
        replace_submodule(ToyModel(), "layers.0.nowhere.o_proj", nn.Identity())


def test_adapters_may_target_every_linear_but_the_head():
    assert get_supported_lora_modules(ToyModel()) == sorted(name.rpartition(".")[2] for name in FUSED)


def wrappers(model):
    """Names of the wrapped layers that a forward pass would meet, aliases included."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, BaseLayerWithLoRA)}


def packed_modules(wrapped):
    """Fused module name -> what adapters call its slices, in order, by the first name of the module."""
    fused = {name: module for name, module in wrapped.modules.items() if module.n_slices > 1}
    return {name: list(module.targets)[: module.n_slices] for name, module in fused.items()}


def assert_names(found, expected, what):
    lacking, more = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    assert not lacking and not more, f"{what}: lacking {lacking}, there and not expected {more}"


@pytest.mark.lab("2.5")
def test_every_linear_of_a_model_is_wrapped_but_the_head():
    model = ToyModel(num_layers=3)

    wrapped = wrap(model, NaivePunica())

    assert_names(wrapped.modules, [f"layers.{i}.{name}" for i in range(3) for name in FUSED], "modules")
    assert_names(wrappers(model), wrapped.modules, "wrappers in the model")
    assert wrappers(model) == wrapped.modules
    assert type(model.lm_head) is ParallelLMHead


@pytest.mark.lab("2.5")
def test_adapters_may_name_the_parts_of_fused_linears_and_the_others():
    wrapped = wrap(ToyModel(num_layers=1), NaivePunica())

    assert targets_of(wrapped) == {
        "layers.0.attn.q_proj": ("layers.0.attn.qkv_proj", 0),
        "layers.0.attn.k_proj": ("layers.0.attn.qkv_proj", 1),
        "layers.0.attn.v_proj": ("layers.0.attn.qkv_proj", 2),
        "layers.0.attn.o_proj": ("layers.0.attn.o_proj", 0),
        "layers.0.mlp.gate_proj": ("layers.0.mlp.gate_up_proj", 0),
        "layers.0.mlp.up_proj": ("layers.0.mlp.gate_up_proj", 1),
        "layers.0.mlp.down_proj": ("layers.0.mlp.down_proj", 0),
        "layers.0.router": ("layers.0.router", 0),
        "layers.0.adaptor": ("layers.0.adaptor", 0),
    }
    assert packed_modules(wrapped) == {
        "layers.0.attn.qkv_proj": [f"layers.0.attn.{part}_proj" for part in "qkv"],
        "layers.0.mlp.gate_up_proj": ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"],
    }


def modules_of(model):
    return dict(model.named_modules(remove_duplicate=False))


@pytest.mark.lab("2.5")
def test_a_model_is_as_it_was_if_one_of_its_layers_cannot_be_wrapped():
    """So that whoever had the error can leave that layer out and try again."""
    model = SharingModel()
    model.layers[1].attn.o_proj = SpecialLinear(16, HIDDEN)
    before = modules_of(model)

    with pytest.raises(ValueError, match=r"layers\.1\.attn\.o_proj \(SpecialLinear\) cannot be wrapped"):
        wrap(model, NaivePunica())

    assert_names(modules_of(model), before, "modules of the model")
    other = [name for name, module in modules_of(model).items() if module is not before[name]]
    assert not other, f"other modules than before: {other}"
    assert len(wrap(model, NaivePunica(), target_modules=["router"]).modules) == 2


@pytest.mark.lab("2.5")
@pytest.mark.parametrize("fails", [1, 2, 5])
def test_a_model_is_as_it_was_if_there_is_no_memory_for_all_slots(fails):
    model, punica, placed = SharingModel(), NaivePunica(), []
    before = modules_of(model)

    def place(slots, base):
        placed.append(base)
        if len(placed) == fails:
            raise MemoryError("no more slots")
        return slots

    punica.place = place

    with pytest.raises(MemoryError, match="no more slots"):
        wrap(model, punica)

    assert modules_of(model) == before, "the model has other modules than before"


@pytest.mark.lab("2.5")
@pytest.mark.parametrize(
    "target", ["layers.1.mlp.up_proj", "layers.0.mlp.up_proj", "layers.1.mlp.gate_up_proj"]
)
def test_a_shared_fused_module_is_the_same_by_whichever_name_it_is_wanted(target):
    model = SharingModel()

    wrapped = wrap(model, NaivePunica(), target_modules=[target])

    first, second = "layers.0.mlp.gate_up_proj", "layers.1.mlp.gate_up_proj"
    assert_names(wrapped.modules, [first], "modules")
    assert_names(wrappers(model), [first, second], "places with a wrapper")
    assert_names(
        wrapped.claims,
        [f"layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "gate_up")],
        "claims",
    )
    assert set(wrapped.claims.values()) == {first}


@pytest.mark.lab("2.5")
def test_a_linear_at_the_top_of_a_model_is_wrapped():
    model = ToyModel(num_layers=1)
    model.qkv_proj = QKVParallelLinear(HIDDEN, 4, 1)

    wrapped = wrap(model, NaivePunica())

    assert model.qkv_proj is wrapped.modules["qkv_proj"]
    assert targets_of(wrapped)["k_proj"] == ("qkv_proj", 1)
    assert packed_modules(wrapped)["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.lab("2.5")
def test_every_wrapped_layer_is_handed_to_the_backend_once():
    placed = []
    punica = NaivePunica()
    punica.place = lambda slots, base: placed.append(base) or slots

    wrapped = wrap(ToyModel(), punica)

    assert all(module.punica_wrapper is punica for module in wrapped.modules.values())
    assert sorted(map(id, placed)) == sorted(id(module.base_layer) for module in wrapped.modules.values())


@pytest.mark.lab("2.5")
def test_a_module_with_two_names_gets_one_wrapper_in_both_places():
    model = SharingModel()

    wrapped = wrap(model, NaivePunica())

    found = wrappers(model)
    names = {f"layers.{layer}.{linear}" for layer in (0, 1) for linear in FUSED}
    assert_names(found, names | {"layers.1.runner.gate"}, "places with a wrapper")
    assert model.layers[1].router is model.layers[1].runner.gate, "two wrappers for one router"
    assert model.layers[0].mlp.down_proj is model.layers[1].mlp.down_proj
    assert {id(module) for module in found.values()} == {id(module) for module in wrapped.modules.values()}
    assert len(wrapped.modules) == len({id(module) for module in found.values()})
    assert not any(isinstance(m.base_layer, BaseLayerWithLoRA) for m in wrapped.modules.values())


@pytest.mark.lab("2.5")
def test_every_name_that_adapters_may_use_is_claimed_for_its_module():
    """By its first name, which packing looks it up by. That of a fused module among them: an adapter may have weights
    for all of it.
    """
    wrapped = wrap(SharingModel(), NaivePunica())

    gate_up = {f"layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "gate_up")}
    claimed = {name for name, module in wrapped.claims.items() if module == "layers.0.mlp.gate_up_proj"}
    assert_names(claimed, gate_up, "claimed for the shared gate_up_proj")
    router = {name for name, module in wrapped.claims.items() if module == "layers.1.router"}
    assert_names(router, ["layers.1.router", "layers.1.runner.gate"], "claimed for the shared router")
    assert targets_of(wrapped)["layers.1.mlp.down_proj"] == ("layers.0.mlp.down_proj", 0)
    shared = wrapped.modules["layers.0.mlp.gate_up_proj"]
    assert shared.targets == {
        f"layers.{i}.mlp.{name}_proj": part for i in (0, 1) for part, name in enumerate(("gate", "up"))
    }
    packed = packed_modules(wrapped)
    assert_names(
        packed, [f"layers.{name}_proj" for name in ("0.attn.qkv", "0.mlp.gate_up", "1.attn.qkv")], "packed"
    )
    assert packed["layers.0.mlp.gate_up_proj"] == ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"]


@pytest.mark.lab("2.5")
def test_whatever_else_a_wrapper_says_it_is_called_is_claimed(monkeypatch):
    """Experts' wrappers know their parts as other checkpoints spell them, whose adapters would be refused else."""
    monkeypatch.setattr(
        RowParallelLinearWithLoRA, "also_called", lambda self, name: [f"{name}.w1", f"{name}.w2"]
    )

    wrapped = wrap(ToyModel(num_layers=1), NaivePunica(), target_modules=["o_proj"])

    o_proj = "layers.0.attn.o_proj"
    assert_names(wrapped.claims, [o_proj, f"{o_proj}.w1", f"{o_proj}.w2"], "claims")


@pytest.mark.lab("2.5")
def test_a_wrapper_stands_where_it_says(monkeypatch):
    """The output layer's stands for the module that computes logits, not for the weight."""
    monkeypatch.setattr(
        RowParallelLinearWithLoRA, "place_of", classmethod(lambda cls, name: f"{name}_and_more")
    )
    model = ToyModel(num_layers=1)
    base = model.layers[0].attn.o_proj

    wrapped = wrap(model, NaivePunica(), target_modules=["o_proj"])

    assert model.layers[0].attn.o_proj is base, "the layer itself was replaced"
    assert model.layers[0].attn.o_proj_and_more is wrapped.modules["layers.0.attn.o_proj"]


@pytest.mark.lab("2.5")
@pytest.mark.parametrize(
    ("target_modules", "expected"),
    [
        (["o_proj"], ["0.attn.o_proj", "1.attn.o_proj"]),
        (["q_proj"], ["0.attn.qkv_proj", "1.attn.qkv_proj"]),
        (["qkv_proj", "router"], ["0.attn.qkv_proj", "0.router", "1.attn.qkv_proj", "1.router"]),
        (["up_proj", "gate_up_proj"], ["0.mlp.gate_up_proj", "1.mlp.gate_up_proj"]),
        # By its full name one layer's module.
        (["layers.1.attn.o_proj"], ["1.attn.o_proj"]),
        (["layers.1.attn.qkv_proj"], ["1.attn.qkv_proj"]),
        (["layers.1.attn.k_proj"], ["1.attn.qkv_proj"]),
    ],
    ids=" ".join,
)
def test_only_the_servers_target_modules_are_wrapped(target_modules, expected):
    model = ToyModel(num_layers=2)

    wrapped = wrap(model, NaivePunica(), target_modules=target_modules)

    assert_names(wrapped.modules, [f"layers.{name}" for name in expected], "modules")
    assert wrappers(model) == wrapped.modules


@pytest.mark.lab("2.5")
def test_a_shared_module_is_wrapped_in_all_places_if_one_of_its_names_is_wanted():
    model = SharingModel()

    wrapped = wrap(model, NaivePunica(), target_modules=["gate"])

    names = ["layers.1.router", "layers.1.runner.gate"]
    assert_names(targets_of(wrapped), names, "targets")
    assert_names(wrappers(model), names, "places with a wrapper")
    assert_names(wrapped.modules, names[:1], "modules, which go by the first name, wanted or not")


@pytest.mark.lab("2.5")
def test_the_first_name_is_the_models_first_and_not_the_alphabets():
    model = ToyModel(num_layers=11)
    model.layers[10].attn.o_proj = model.layers[2].attn.o_proj

    wrapped = wrap(model, NaivePunica(), target_modules=["o_proj"])

    assert_names(wrapped.modules, [f"layers.{i}.attn.o_proj" for i in range(10)], "modules")
    assert wrapped.claims["layers.10.attn.o_proj"] == "layers.2.attn.o_proj"


@pytest.mark.parametrize("unknown", ["qproj", "lm_head", "embed_tokens", "layers.7.attn.o_proj", "Q_PROJ"])
def test_a_target_that_the_model_does_not_have_is_refused(unknown):
    model = ToyModel()

    with pytest.raises(ValueError, match=f"'{unknown}'.*only adaptor, down_proj, gate_up_proj, o_proj"):
        wrap(model, NaivePunica(), target_modules=["o_proj", unknown])

    assert not wrappers(model)


@pytest.mark.parametrize("target_modules", [None, ["o_proj"]])
def test_a_model_without_linears_is_refused(target_modules):
    model = ToyModel(num_layers=0)

    with pytest.raises(ValueError, match="ToyModel has no linear layer that LoRA could be applied to"):
        wrap(model, NaivePunica(), target_modules=target_modules)


def test_a_target_that_is_no_linear_of_ours_is_refused_by_name():
    """torch's own would be left alone in silence; without `target_modules` nobody asked for it."""
    model = ToyModel(num_layers=1)
    model.side = nn.Module()
    model.side.o_proj = nn.Linear(4, 6)

    with pytest.raises(ValueError, match=r"side\.o_proj \(Linear\) cannot be wrapped for LoRA"):
        wrap(model, NaivePunica(), target_modules=["o_proj"])

    assert type(model.layers[0].attn.o_proj) is RowParallelLinear, "nothing was wrapped"
    assert "side.o_proj" not in targets_of(wrap(model, NaivePunica()))


@pytest.mark.lab("2.5")
def test_a_forward_pass_through_the_model_meets_the_adapter():
    """Calling a layer by its place in the model runs the wrapper, under either name."""
    model = SharingModel()
    punica = NaivePunica([0, -1])
    wrapped = wrap(model, punica)
    lora_a, lora_b = random_pair(HIDDEN, 2, 3, seed=1)
    x = random_pair(HIDDEN, 2, 1, seed=2)[0]

    wrapped.modules["layers.1.router"].set_lora(0, lora_a, lora_b)

    base, _ = wrapped.modules["layers.1.router"].base_layer(x)
    expected = base + torch.stack([lora_b @ lora_a @ x[0], torch.zeros(3, dtype=x.dtype)])
    for layer in (model.layers[1].router, model.layers[1].runner.gate):
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-13, atol=1e-13)
