"""Experts with adapters against float64 arithmetic, pair by pair; every backend, mixed batches, slots used again."""

import numpy as np
import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import FusedMoE
from minivllm.vllm.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, LoRAMapping
from minivllm.vllm.punica_selector import get_punica_wrapper
from minivllm.vllm.utils import from_layer
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE
from tests.tools.memory import ScatteredSlots

HIDDEN, INNER, EXPERTS, TOP_K = 12, 20, 5, 3
SLOTS, RANK = 3, 6
# K and N of w1, w2, w3.
SHAPES = [(HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, INNER)]
BACKENDS = ["loops", "grouped", "triton"]
# Slots of a batch's tokens: base rows first, last and between; runs of one; slot 0 and the highest.
MIXED = [-1, 2, 2, 0, -1, 1, 0, 0, 2, -1, 1, -1]


def base_layer(dtype=torch.float64, renormalize=True, device="cpu"):
    layer = FusedMoE(EXPERTS, TOP_K, HIDDEN, INNER, renormalize, dtype, device)
    generator = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return layer


def random_adapter(seed, ranks=(3, 2, 6), experts=EXPERTS):
    """[w1, w2, w3] of A (E, r, K) and of B (E, N, r) in float64; rank 0 = no such part."""
    generator = torch.Generator().manual_seed(seed)
    lora_a, lora_b = [], []
    for (width, height), rank in zip(SHAPES, ranks, strict=True):
        a, b = (
            torch.randn(experts, *shape, generator=generator, dtype=torch.float64) * 0.5
            for shape in ((rank, width), (height, rank))
        )
        lora_a.append(a if rank else None)
        lora_b.append(b if rank else None)
    return lora_a, lora_b


def wrap(base, backend="loops", parts=("w1", "w3"), slots=SLOTS, **options):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=slots, punica_backend=backend, **options)
    layer = from_layer(base, slots, config, list(parts))
    layer.set_mapping(get_punica_wrapper(64, 64, base.w13_weight.device, lora_config=config))
    return layer


def use_slots(layer, slots):
    """Tell the backend the slot of every row; adapter s + 1 sits in slot s."""
    ids = tuple(slot + 1 for slot in slots)
    layer.punica_wrapper.update_metadata(LoRAMapping(ids, ids), [s + 1 for s in range(SLOTS)], SLOTS + 1, 97)


def batch(tokens, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens, HIDDEN), (tokens, EXPERTS)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def one_by_one(base, adapters, slots, x, router_logits):
    """Token by token and expert by expert, in numpy: W + B A of the token's own adapter, for w1, w2 and w3."""
    x, logits, w13, w2 = (
        t.double().cpu().numpy() for t in (x, router_logits, base.w13_weight, base.w2_weight)
    )
    output = np.zeros_like(x)
    for token, slot in enumerate(slots):
        likelihood = np.exp(logits[token]) / np.exp(logits[token]).sum()
        chosen = np.argsort(-likelihood)[:TOP_K]
        total = likelihood[chosen].sum() if base.renormalize else 1.0
        for expert in chosen:
            weights = [w13[expert, :INNER], w2[expert], w13[expert, INNER:]]
            for i, (a, b) in enumerate(zip(*adapters[slot], strict=True) if slot >= 0 else ()):
                if a is not None:
                    weights[i] = weights[i] + b[expert].numpy() @ a[expert].numpy()
            gate, up = weights[0] @ x[token], weights[2] @ x[token]
            output[token] += likelihood[expert] / total * (weights[1] @ (gate / (1 + np.exp(-gate)) * up))
    return output


def labels(slots):
    return [
        f"token {token}, " + (f"slot {slot}" if slot >= 0 else "base") for token, slot in enumerate(slots)
    ]


def assert_answers(layer, adapters, slots, tolerance=1e-5, seed=0):
    """Of a random batch. `adapters`: of each slot; they are in the layer by now."""
    base = layer.base_layer
    use_slots(layer, slots)
    x, router_logits = batch(len(slots), base.w13_weight.dtype, seed, base.w13_weight.device)

    actual = layer(x, router_logits)

    assert actual.dtype == x.dtype
    expected = one_by_one(base, adapters, slots, x, router_logits)
    assert_rows_equal(actual, expected, labels=labels(slots), tolerance=tolerance)


def filled(layer, adapters):
    for slot, (lora_a, lora_b) in enumerate(adapters):
        layer.set_lora(slot, lora_a, lora_b)
    return layer


class TestForward:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("renormalize", [True, False])
    def test_every_pair_gets_what_its_tokens_adapter_has_for_its_expert(self, backend, renormalize):
        dtype = torch.float32 if backend == "triton" else torch.float64
        base = base_layer(dtype, renormalize, DEVICE if backend == "triton" else "cpu")
        adapters = [random_adapter(1), random_adapter(2, (6, 5, 1)), random_adapter(3, (1, 6, 4))]

        layer = filled(wrap(base, backend), adapters)

        assert_answers(layer, adapters, MIXED, 1e-12 if dtype == torch.float64 else 1e-5)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        "slots",
        [[1], [-1], [2] * 9, list(range(3)) * 5, [0, -1] * 20],
        ids=lambda slots: f"{len(slots)} rows",
    )
    def test_batches_of_any_size_and_order(self, backend, slots):
        adapters = [random_adapter(seed) for seed in range(3)]

        layer = filled(wrap(base_layer(torch.float32, device=DEVICE), backend), adapters)

        assert_answers(layer, adapters, slots, seed=1)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("ranks", [(4, 0, 0), (0, 4, 0), (0, 0, 4), (3, 0, 2)], ids=str)
    def test_an_adapter_may_lack_parts(self, backend, ranks):
        adapters = [random_adapter(seed, ranks) for seed in range(3)]

        layer = filled(wrap(base_layer(torch.float32, device=DEVICE), backend), adapters)

        assert_answers(layer, adapters, MIXED)

    @pytest.mark.parametrize("backend", ["loops", "grouped"])
    @pytest.mark.parametrize(
        ("dtype", "lora_dtype"), [(torch.bfloat16, "auto"), (torch.float32, torch.bfloat16)]
    )
    def test_half_precision_is_near_the_exact_result(self, backend, dtype, lora_dtype):
        adapters = [
            [[tensor.bfloat16().double() for tensor in side] for side in random_adapter(seed)]
            for seed in range(3)
        ]

        layer = filled(wrap(base_layer(dtype), backend, lora_dtype=lora_dtype), adapters)

        assert_answers(layer, adapters, MIXED, 3e-2 if dtype == torch.bfloat16 else 1e-5)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("slots", [[-1] * 4, [1] * 4, [1, -1, 1, -1]], ids=str)
    def test_what_no_adapter_of_the_batch_has_experts_for_is_the_base_layers_alone(
        self, backend, slots, monkeypatch
    ):
        """To the bit, as base rows beside others are."""
        base = base_layer(torch.float32, device=DEVICE)
        layer = wrap(base, backend)
        layer.set_lora(0, *random_adapter(1))
        layer.set_lora(2, *random_adapter(2))
        use_slots(layer, slots)
        x, router_logits = batch(4, torch.float32, device=DEVICE)
        for name in ("pair_rows", "add"):
            monkeypatch.setattr(layer.punica_wrapper.backend, name, None)

        actual = layer(x, router_logits)

        assert_rows_equal(actual, base(x, router_logits))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_base_rows_are_those_of_the_base_layer_to_the_bit(self, backend):
        base = base_layer(torch.float32, device=DEVICE)
        layer = filled(wrap(base, backend), [random_adapter(slot) for slot in range(SLOTS)])
        use_slots(layer, MIXED)
        x, router_logits = batch(len(MIXED), torch.float32, device=DEVICE)
        rows = [token for token, slot in enumerate(MIXED) if slot < 0]

        actual = layer(x, router_logits)

        assert_rows_equal(actual[rows], base(x, router_logits)[rows], labels=[f"token {t}" for t in rows])

    def test_slots_may_lie_anywhere(self):
        layer, adapters = wrap(base_layer()), [random_adapter(seed) for seed in range(3)]
        layer.slots = ScatteredSlots(torch.float64).place(layer.slots, None)

        filled(layer, adapters)

        assert_answers(layer, adapters, MIXED, 1e-12)


class TestSlots:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        "second",
        [(1, 1, 1), (0, 6, 0), (2, 0, 0), None],
        ids=["shorter", "w2 alone", "w1 alone", "no experts"],
    )
    def test_nothing_of_the_last_adapter_is_left(self, backend, second):
        ranks = second or (0, 0, 0)
        adapters = [random_adapter(2), random_adapter(3, ranks)]
        layer = wrap(base_layer(torch.float32, device=DEVICE), backend)
        filled(layer, [adapters[0], random_adapter(1, (6, 6, 6))])

        if second is None:
            layer.reset_lora(1)
        else:
            layer.set_lora(1, *adapters[1])

        assert_answers(layer, adapters, [0, 1, -1, 1, 1, 0])
        for i, rank in enumerate(ranks):
            assert layer.slots.live_ranks[i][1] == rank
            assert not layer.lora_a_stacked[i][1, :, rank:].any()
            assert not layer.lora_b_stacked[i][1, :, :, rank:].any()

    def test_buffers_have_vllms_names_and_shapes(self):
        layer = wrap(base_layer())

        assert [tuple(a.shape) for a in layer.w13_lora_a_stacked] == [(SLOTS, EXPERTS, RANK, HIDDEN)] * 2
        assert [tuple(b.shape) for b in layer.w13_lora_b_stacked] == [(SLOTS, EXPERTS, INNER, RANK)] * 2
        assert [tuple(a.shape) for a in layer.w2_lora_a_stacked] == [(SLOTS, EXPERTS, RANK, INNER)]
        assert [tuple(b.shape) for b in layer.w2_lora_b_stacked] == [(SLOTS, EXPERTS, HIDDEN, RANK)]
        assert layer.n_slices == 3
        w1, w2, w3 = layer.lora_a_stacked
        assert layer.w13_lora_a_stacked == (w1, w3) and layer.w2_lora_a_stacked == (w2,)
        assert [layer.part_shape(3 * 4 + j) for j in range(3)] == SHAPES

    @pytest.mark.parametrize(("given", "found"), [("auto", torch.float64), (torch.bfloat16, torch.bfloat16)])
    def test_slots_have_the_base_weights_dtype_or_the_configs(self, given, found):
        layer = wrap(base_layer(), lora_dtype=given)

        assert {t.dtype for t in (*layer.slots.a, *layer.slots.b)} == {found}


class TestGateAndUpInOne:
    """FusedMoE3DWithLoRA, for which adapters have one A for gate and up."""

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_is_the_other_layer_with_that_a_twice(self, backend):
        base = base_layer(torch.float32, device=DEVICE)
        two, three = wrap(base, backend), wrap(base, backend, parts=["w13"])
        for slot in range(SLOTS):
            (a1, a2, _), (b1, b2, b3) = random_adapter(slot, (4, 3, 4))
            two.set_lora(slot, [a1, a2, a1], [b1, b2, b3])
            three.set_lora(slot, [a1, a2], [torch.cat([b1, b3], dim=1), b2])
        for layer in (two, three):
            use_slots(layer, MIXED)
        x, router_logits = batch(len(MIXED), torch.float32, device=DEVICE)

        actual = three(x, router_logits)

        assert_rows_equal(actual, two(x, router_logits), labels=labels(MIXED), tolerance=1e-6)
        assert not torch.allclose(actual, base(x, router_logits))

    def test_has_two_slices_of_which_w13s_is_as_tall_as_both(self):
        layer = wrap(base_layer(), parts=["w13"])

        assert [tuple(b.shape) for b in layer.w13_lora_b_stacked] == [(SLOTS, EXPERTS, 2 * INNER, RANK)]
        assert [tuple(b.shape) for b in layer.w2_lora_b_stacked] == [(SLOTS, EXPERTS, HIDDEN, RANK)]
        assert [layer.part_shape(2 * 4 + j) for j in range(2)] == [(HIDDEN, 2 * INNER), (INNER, HIDDEN)]

    @pytest.mark.parametrize(
        ("parts", "wrapper"), [(["w13"], FusedMoE3DWithLoRA), (["w1", "w3"], FusedMoEWithLoRA)]
    )
    def test_is_taken_where_the_checkpoint_names_one_part(self, parts, wrapper):
        assert type(wrap(base_layer(), parts=parts)) is wrapper
