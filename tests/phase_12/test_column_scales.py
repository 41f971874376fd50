"""From magnitudes to scales: by PEFT's norm of W + s B A, for every kind of linear and of weight."""

from dataclasses import replace

import pytest
import torch
from dora_linears import KINDS, Adapter, Wrapped, adapter, linear

from minivllm.dora import scales as module
from minivllm.dora.scales import ScaledLinears
from minivllm.layers.linear import can_pack
from minivllm.layers.quantization import quantize_linears

pytestmark = pytest.mark.lab("12.3")


@pytest.fixture(scope="module", autouse=True)
def oracle():
    """Imported before any test's time counts."""
    import peft.tuners.lora.dora  # noqa: F401


def scales_of(wrapped, given):
    return wrapped.scaled.scales("m", given.parts(wrapped.base), given.magnitudes())


def assert_peft_agrees(found, given, base, **tolerance):
    there = [i for i, own in enumerate(given.slices) if own is not None]
    assert len(found) == len(there), f"{len(found)} scales for {len(there)} parts"
    for i, one in zip(there, found):
        expected = (given.scale(base, i) - 1)[None]
        torch.testing.assert_close(
            one.double(), expected, **tolerance, msg=lambda said, i=i: f"slice {i}: {said}"
        )


EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without"])
def test_they_are_magnitudes_by_lengths_of_rows_less_one(kind, bias):
    wrapped, given = Wrapped(linear(kind, bias), kind), adapter(kind)

    found = scales_of(wrapped, given)

    assert_peft_agrees(found, given, wrapped.base, **EXACT)


def test_on_paper():
    """W has the rows (3, 4) and (0, 2), B A adds (0, 0) and (0, 3). Lengths 5 and 5, magnitudes 10 and 5."""
    base = linear()
    base.weight.data.zero_()
    base.weight[0, :2], base.weight[1, 1] = torch.tensor([3.0, 4.0]), 2.0
    base.weight[2:, 0] = 1.0
    a, b = torch.zeros(1, 12, dtype=torch.float64), torch.zeros(10, 1, dtype=torch.float64)
    a[0, 1], b[1, 0] = 1.0, 2.0
    magnitude = torch.tensor([10.0, 5.0, *[1.0] * 8], dtype=torch.float64)

    (found,) = scales_of(Wrapped(base), Adapter("one", [(a, b, magnitude)], scaling=1.5))

    assert found.tolist() == [[1.0, *[0.0] * 9]]


def test_a_magnitude_that_is_the_length_scales_nothing():
    wrapped, given = Wrapped(linear()), adapter()
    a, b, _ = given.slices[0]
    lengths = (wrapped.base.weight + given.scaling * b @ a).norm(dim=1)

    (found,) = scales_of(wrapped, Adapter("one", [(a, b, lengths)], given.scaling))

    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("without", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_slices_that_the_adapter_leaves_alone_have_none(without):
    wrapped, given = Wrapped(linear("qkv"), "qkv"), adapter("qkv", without=without)

    found = scales_of(wrapped, given)

    assert_peft_agrees(found, given, wrapped.base, **EXACT)


def test_the_name_says_which_layer():
    first, second = Wrapped(linear(seed=1)), Wrapped(linear(seed=2))
    both, given = ScaledLinears({"first": first.layer, "second": second.layer}), adapter()

    for name, wrapped in (("second", second), ("first", first)):
        found = both.scales(name, given.parts(wrapped.base), given.magnitudes())
        assert_peft_agrees(found, given, wrapped.base, **EXACT)


@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_adapter", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_any_dtype_they_are_worked_out_in_float32_and_given_in_that_of_b(of_base, of_adapter):
    wrapped, given = Wrapped(linear("merged", dtype=of_base), "merged"), adapter("merged", dtype=of_adapter)
    parts = given.parts(wrapped.base)
    folded = replace(
        given, scaling=1.0, slices=[(p.lora_a, p.lora_b, own[2]) for p, own in zip(parts, given.slices)]
    )

    found = wrapped.scaled.scales("m", parts, given.magnitudes())

    assert [one.dtype for one in found] == [of_adapter] * 2
    # No more than rounded once, to the dtype that it is given in.
    near = {"rtol": 1.01 * torch.finfo(of_adapter).eps / 2 + 1e-5, "atol": 4e-6}
    assert_peft_agrees(found, folded, wrapped.base, **near)


def test_a_weight_that_a_cpu_has_reordered_counts_as_what_it_was():
    if not can_pack():
        pytest.skip("this PyTorch reorders no weights")
    plain, reordered = linear("qkv", dtype=torch.float32), linear("qkv", dtype=torch.float32)
    wrapped, given = Wrapped(reordered, "qkv"), adapter("qkv", dtype=torch.float32)
    reordered.pack()
    assert not reordered.weight.numel()

    found = scales_of(wrapped, given)

    assert_peft_agrees(found, given, plain, rtol=1e-4, atol=1e-4)


def test_an_int8_weight_counts_as_what_the_layer_computes_with():
    base = linear("merged", dtype=torch.float32)
    wrapped, before = Wrapped(base, "merged"), base.weight.clone()
    quantize_linears(wrapped.layer, "cpu")
    given = adapter("merged", dtype=torch.float32)
    assert (base.weight.dequantize() - before).abs().max() > 1e-3

    found = scales_of(wrapped, given)

    assert_peft_agrees(found, given, base, rtol=1e-4, atol=1e-5)


def test_lengths_of_the_weights_own_rows_are_worked_out_once(monkeypatch):
    """They are the same for every adapter, and a large weight's take long."""
    asked, wrapped = [], Wrapped(linear())
    monkeypatch.setattr(
        module, "squared_lengths", lambda base, real=module.squared_lengths: asked.append(1) or real(base)
    )

    for seed in (0, 1, 2):
        given = adapter(seed=seed)
        assert_peft_agrees(scales_of(wrapped, given), given, wrapped.base, **EXACT)

    assert len(asked) <= 1, f"{len(asked)} times for three adapters"


@pytest.mark.parametrize("kind", ["one", "qkv"])
def test_a_row_without_a_length_is_refused_with_the_parts_name(kind):
    wrapped, given = Wrapped(linear(kind), kind), adapter(kind)
    wrapped.base.weight[-2] = 0
    given.slices[-1][1][-2] = 0  # of B

    with pytest.raises(ValueError, match=KINDS[kind][1][-1]):
        scales_of(wrapped, given)


def test_a_row_of_zeros_in_the_weight_alone_has_the_length_that_the_adapter_gives_it():
    wrapped, given = Wrapped(linear()), adapter()
    wrapped.base.weight[3] = 0

    assert_peft_agrees(scales_of(wrapped, given), given, wrapped.base, **EXACT)


def test_of_an_adapter_without_numbers_there_are_the_shapes():
    """`minivllm inspect` asks how large it is, and reads no weights."""
    wrapped, given = Wrapped(linear("qkv"), "qkv"), adapter("qkv", without=(1,))
    parts = [
        part and replace(part, lora_a=part.lora_a.to("meta"), lora_b=part.lora_b.to("meta"))
        for part in given.parts(wrapped.base)
    ]
    magnitudes = [each if each is None else each.to("meta") for each in given.magnitudes()]

    found = wrapped.scaled.scales("m", parts, magnitudes)

    assert [(one.shape, one.device.type) for one in found] == [((1, 16), "meta"), ((1, 8), "meta")]


def test_they_lie_on_the_cpu_beside_a_and_b():
    found = scales_of(Wrapped(linear()), adapter())

    assert [one.device.type for one in found] == ["cpu"]
