"""One module's A and B: scaling folded once (lab 1.4), parts of a fused module (lab 1.5) and experts (1.7) packed."""

import pytest
import torch

from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from tests.oracles.rows import assert_rows_equal
from tests.worlds.adapter_folders import good_config


def random_weights(name="q_proj", rank=3, scaling=2.5, width_in=7, width_out=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    lora_a, lora_b = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((rank, width_in), (width_out, rank))
    )
    return LoRALayerWeights(name, rank, 100 + seed, lora_a, lora_b, scaling=scaling)


def delta(lora_a, lora_b, scaling):
    """The definition of scaling * B @ A, (N, K), one number at a time."""
    product = torch.zeros(len(lora_b), lora_a.shape[1], dtype=torch.float64)
    for row in range(product.shape[0]):
        for column in range(product.shape[1]):
            for k in range(len(lora_a)):
                product[row, column] += scaling * lora_b[row, k].item() * lora_a[k, column].item()
    return product


class TestOptimize:
    pytestmark = pytest.mark.lab("1.4")

    @pytest.mark.parametrize("scaling", [2.5, 2, 0.125, -3, 1, 0, 129 / 128, 1 - 2**-20])
    def test_moves_the_scaling_into_b_once(self, scaling):
        weights = random_weights(scaling=scaling)
        a, expected = weights.lora_a.clone(), delta(weights.lora_a, weights.lora_b, scaling)

        assert weights.optimize() is weights, "optimize returns its object"

        assert weights.scaling == 1, f"scaling is {weights.scaling}; 1 says that it is in B by now"
        assert_rows_equal(weights.lora_a, a, what="A")
        assert_rows_equal(
            weights.lora_b @ weights.lora_a, expected, tolerance=1e-12, what=f"B @ A after scaling {scaling}"
        )
        once = weights.lora_b.clone()
        weights.optimize()
        assert_rows_equal(weights.lora_b, once, what="B after a second time")

    def test_a_scaling_that_was_set_since_is_moved_too(self):
        weights = random_weights(scaling=2.5).optimize()
        expected = delta(weights.lora_a, weights.lora_b, -3)
        weights.scaling = -3

        weights.optimize()

        assert weights.scaling == 1, f"scaling is {weights.scaling} after the second optimize"
        assert_rows_equal(weights.lora_b @ weights.lora_a, expected, tolerance=1e-12, what="B @ A")

    def test_does_not_write_to_tensors_that_others_hold(self):
        shared = random_weights()
        before = shared.lora_a.clone(), shared.lora_b.clone()
        mine = LoRALayerWeights("q_proj", 3, 99, shared.lora_a, shared.lora_b, scaling=4)

        mine.optimize()

        assert_rows_equal(shared.lora_a, before[0], what="A of the other holder")
        assert_rows_equal(shared.lora_b, before[1], what="B of the other holder")

    def test_leaves_what_is_beside_b_alone(self):
        """It was scaled when it was read."""
        weights, bias = random_weights(scaling=2.5), torch.linspace(-1, 1, 5)[None]
        weights.beside = {"bias": bias.clone()}

        weights.optimize()

        assert weights.beside.keys() == {"bias"}, f"beside B is {weights.beside}, and was a bias"
        assert_rows_equal(weights.beside["bias"], bias, what="bias")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_keeps_the_dtype(self, dtype):
        assert random_weights(dtype=dtype).optimize().lora_b.dtype == dtype

    def test_of_a_packed_module_scales_each_part_by_its_own_factor_once(self):
        q, v = random_weights(seed=1, rank=2), random_weights(seed=2, rank=4)
        packed = PackedLoRALayerWeights(
            "qkv_proj",
            4,
            [3, None, 5],
            [q.lora_a, None, v.lora_a],
            [q.lora_b, None, v.lora_b],
            [1.5, None, 0.25],
        )

        before = q.lora_b.clone(), v.lora_b.clone()

        assert packed.optimize().optimize() is packed

        assert packed.scaling == [1, None, 1]
        assert packed.lora_b[1] is None
        for i, (b, scaling) in enumerate(zip(before, (1.5, 0.25))):
            assert_rows_equal(packed.lora_b[2 * i], b * scaling, what=f"B of part {2 * i}")
        assert_rows_equal(q.lora_b, before[0], what="B of the other holder")


class TestPack:
    pytestmark = pytest.mark.lab("1.5")

    def test_keeps_every_part_in_its_place_with_its_own_rank_and_scaling(self):
        parts = [
            random_weights("q_proj", rank=2, scaling=0.5, width_out=6, seed=1),
            random_weights("k_proj", rank=5, scaling=-4, width_out=3, seed=2),
            random_weights("v_proj", rank=3, scaling=7, width_out=3, seed=3),
        ]
        expected = [delta(part.lora_a, part.lora_b, part.scaling) for part in parts]

        packed = PackedLoRALayerWeights.pack(parts)

        assert [len(a) for a in packed.lora_a] == [2, 5, 3]
        for part, b, a, whole in zip(parts, packed.lora_b, packed.lora_a, expected):
            assert_rows_equal(b @ a, whole, tolerance=1e-12, what=f"B @ A of {part.module_name}")
        assert packed.rank == 5, "the rank of a packed module is the largest of its parts'"
        ranks = [part.rank for part in packed.parts]
        assert ranks == [2, 5, 3], f"ranks of the parts: {ranks}, expected each one's own, 2, 5 and 3"
        assert packed.lora_alphas == [101, 102, 103]
        assert packed.module_name == "q_proj"
        assert packed.is_packed

    def test_folds_the_scaling_of_all_parts_so_that_optimize_has_nothing_left_to_do(self):
        packed = PackedLoRALayerWeights.pack(
            [random_weights(scaling=3, seed=1), random_weights(scaling=5, seed=2)]
        )
        before = [b.clone() for b in packed.lora_b]

        packed.optimize()

        assert packed.scaling == [1, 1]
        for now, then in zip(packed.lora_b, before, strict=True):
            assert_rows_equal(now, then, what="B after optimize")

    def test_a_part_whose_scaling_is_zero_is_there_and_adds_nothing(self):
        """So it is of an adapter with an alpha of 0."""
        still = random_weights("k_proj", rank=6, scaling=0, seed=2)

        packed = PackedLoRALayerWeights.pack([random_weights(rank=2, scaling=3, seed=1), still])

        assert packed.rank == 6, "a part of scaling 0 takes room in its slot like any other"
        assert packed.scaling == [1, 1]
        assert_rows_equal(packed.lora_b[1], torch.zeros_like(still.lora_b), what="B of the part of scaling 0")

    @pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
    def test_leaves_a_hole_where_the_adapter_has_no_part(self, missing):
        parts = [
            random_weights(name, rank=i + 2, seed=i) for i, name in enumerate(("q_proj", "k_proj", "v_proj"))
        ]
        present = [None if i in missing else part for i, part in enumerate(parts)]

        packed = PackedLoRALayerWeights.pack(present)

        for name in ("lora_a", "lora_b", "scaling", "lora_alphas"):
            holes = [i for i, value in enumerate(getattr(packed, name)) if value is None]
            assert holes == list(missing), f"{name}: None at {holes}, expected at {list(missing)}"
        kept = [i for i in range(3) if i not in missing]
        assert packed.rank == max(kept) + 2
        assert packed.module_name == parts[kept[0]].module_name
        for i in kept:
            assert_rows_equal(packed.lora_a[i], parts[i].lora_a, what=f"A of part {i}")

    def test_a_part_that_was_optimized_before_is_not_scaled_again(self):
        part = random_weights(scaling=3).optimize()
        once = part.lora_b.clone()

        packed = PackedLoRALayerWeights.pack([part, None])

        assert_rows_equal(packed.lora_b[0], once, what="B")

    def test_keeps_what_a_part_has_beside_b(self):
        parts = [random_weights(scaling=3, seed=seed) for seed in (1, 2)]
        biases = [torch.linspace(-1, seed, 5)[None] for seed in (1, 2)]
        for part, bias in zip(parts, biases):
            part.beside = {"bias": bias.clone()}

        packed = PackedLoRALayerWeights.pack([parts[0], None, parts[1]])

        found = [part and part.beside.get("bias") for part in packed.parts]
        assert [bias is None for bias in found] == [False, True, False], f"biases of the parts: {found}"
        for i, bias in zip((0, 2), biases):
            assert_rows_equal(found[i], bias, what=f"bias of part {i}")

    def test_leaves_the_tensors_of_the_parts_to_whoever_shares_them(self):
        part = random_weights(scaling=3)
        shared, before = part.lora_b, part.lora_b.clone()

        PackedLoRALayerWeights.pack([None, part])

        assert_rows_equal(shared, before, what="B that somebody else holds")

    @pytest.mark.parametrize("scaling", [3, 1, 0])
    def test_leaves_the_parts_as_they_are_also_when_the_result_changes(self, scaling):
        """So a thread that reads a part never sees a B of one scaling beside another scaling."""
        part, bias = random_weights(scaling=scaling), torch.ones(1, 5)
        part.beside["bias"] = bias
        before = vars(part) | {"beside": dict(part.beside)}

        packed = PackedLoRALayerWeights.pack([part, None, part])
        packed.parts[0].beside["more"] = bias
        packed.replace_tensors(torch.zeros_like)
        packed.parts[2].rank = 7

        changed = [
            name for name, value in before.items() if name != "beside" and vars(part)[name] is not value
        ]
        assert not changed, f"changed of the part: {changed}"
        assert part.beside.keys() == {"bias"} and part.beside["bias"] is bias, (
            "what is beside the part changed"
        )

    def test_has_new_memory_for_what_was_scaled_and_for_nothing_else(self):
        parts = [random_weights(scaling=1, seed=1), random_weights(scaling=4, seed=2)]
        for part in parts:
            part.beside["bias"] = torch.ones(1, 5)

        packed = PackedLoRALayerWeights.pack(parts)

        tensors = {
            f"{name} of part {i}": (of(packed.parts[i]), of(part))
            for i, part in enumerate(parts)
            for name, of in (
                ("A", lambda part: part.lora_a),
                ("B", lambda part: part.lora_b),
                ("the bias", lambda part: part.beside["bias"]),
            )
        }
        copied = {what for what, (now, then) in tensors.items() if now.data_ptr() != then.data_ptr()}
        assert copied == {"B of part 1"}


PARTS = ("w1", "w2", "w3")
PART_SHAPES = {"w1": (7, 5), "w2": (5, 7), "w3": (7, 5)}  # (K, N)


def experts(count, missing=(), dtype=torch.float64):
    """w1, w2, w3 of every expert, no two of one rank and scaling; None for (expert, part) in `missing`."""
    loras = []
    for expert in range(count):
        for i, part in enumerate(PARTS):
            width, height = PART_SHAPES[part]
            lora = random_weights(
                f"experts.{expert}.{part}",
                rank=1 + (2 * expert + i) % 4,
                scaling=0.5 + expert - 3 * i,
                width_in=width,
                width_out=height,
                seed=3 * expert + i,
                dtype=dtype,
            )
            loras.append(None if (expert, part) in missing else lora)
    return loras


def pack_moe(loras, **options):
    return PackedLoRALayerWeights.pack_moe(loras, "mlp.experts", **options)


def assert_experts_are(packed, deltas):
    """deltas: expert by expert w1, w2, w3, float64 or None for none"""
    for number, expected in enumerate(deltas):
        expert, i = divmod(number, 3)
        a, b = packed.lora_a[i], packed.lora_b[i]
        if a is None:
            assert expected is None, f"{PARTS[i]} is None, but expert {expert} has it"
            continue
        if expected is None:
            expected = torch.zeros(b.shape[1], a.shape[2])
        what = f"scaling * B @ A of {PARTS[i]} of expert {expert}"
        assert_rows_equal(packed.scaling[i] * b[expert] @ a[expert], expected, tolerance=1e-12, what=what)


class TestPackMoe:
    pytestmark = pytest.mark.lab("1.7")

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_stacks_each_part_over_the_experts(self, count):
        loras = experts(count)
        deltas = [delta(lora.lora_a, lora.lora_b, lora.scaling) for lora in loras]

        packed = pack_moe(loras)

        assert [len(values) for values in (packed.lora_a, packed.lora_b, packed.scaling)] == [3] * 3
        for i, part in enumerate(PARTS):
            (width, height), rank = PART_SHAPES[part], max(lora.rank for lora in loras[i::3])
            found = tuple(packed.lora_a[i].shape), tuple(packed.lora_b[i].shape)
            assert found == ((count, rank, width), (count, height, rank)), f"A and B of {part}: {found}"
        assert_experts_are(packed, deltas)
        assert packed.is_packed and packed.module_name == "mlp.experts"
        assert packed.rank == max(lora.rank for lora in loras), "the rank is the largest of all parts"

    def test_every_part_is_scaled_by_its_own_factor(self):
        """Incident 5: rsLoRA of rank 4 and alpha 16 is a scaling of 8; alpha / rank of the first is 4 for all."""
        helper = PEFTHelper.from_dict(
            good_config(r=4, lora_alpha=16, use_rslora=True, alpha_pattern={"experts.1.w3": 10})
        )
        loras = []
        for lora in experts(2):
            width, height = PART_SHAPES[lora.module_name[-2:]]
            trained = LoRALayerWeights.from_config(lora.module_name, helper)
            trained.lora_a, trained.lora_b = torch.ones(4, width), torch.ones(height, 4)
            loras.append(trained)

        packed = pack_moe(loras).optimize()

        # Ones everywhere: B @ A is the rank, 4, times the scaling.
        found = [
            (b[e] @ a[e]).unique().tolist() for e in range(2) for a, b in zip(packed.lora_a, packed.lora_b)
        ]
        assert found == [[32], [32], [32], [32], [32], [20]], (
            "4 times the scaling of each part of each expert"
        )

    def test_a_scaling_that_all_experts_share_is_left_to_optimize(self):
        """As in vLLM, whose own tests read it. One expert of w2 differs, so that w2 has it in B."""
        loras = experts(3)
        for lora, scaling in zip(loras, [8, 2.5, -3] * 3):
            lora.scaling = scaling
        loras[4].scaling = 7
        deltas = [delta(lora.lora_a, lora.lora_b, lora.scaling) for lora in loras]

        packed = pack_moe(loras)

        assert packed.scaling == [8, 1, -3]
        assert_experts_are(packed, deltas)
        packed.optimize()
        assert packed.scaling == [1, 1, 1]
        assert_experts_are(packed, deltas)

    def test_a_shorter_rank_is_filled_up_with_zeros(self):
        loras = experts(4)

        packed = pack_moe(loras)

        for number, lora in enumerate(loras):
            expert, i = divmod(number, 3)
            beyond = packed.lora_a[i][expert, lora.rank :], packed.lora_b[i][expert, :, lora.rank :]
            assert not any(tensor.any() for tensor in beyond), f"{lora.module_name} has rank {lora.rank}"

    @pytest.mark.parametrize(
        "missing",
        [
            {(1, "w1")},
            {(0, "w1"), (0, "w2"), (0, "w3")},
            {(2, "w3"), (1, "w3"), (0, "w2")},
            {(e, part) for e in range(3) for part in PARTS} - {(1, "w2")},
        ],
        ids=["one part", "the first expert", "parts of some", "all but one part"],
    )
    def test_what_has_no_adapter_is_zero(self, missing):
        loras = experts(3, missing)
        deltas = [lora and delta(lora.lora_a, lora.lora_b, lora.scaling) for lora in loras]

        packed = pack_moe(loras)

        assert_experts_are(packed, deltas)

    def test_a_part_that_no_expert_has_is_none(self):
        packed = pack_moe(experts(3, {(e, "w2") for e in range(3)}))

        for name in ("lora_a", "lora_b", "scaling", "lora_alphas"):
            holes = [i for i, value in enumerate(getattr(packed, name)) if value is None]
            assert holes == [1], f"{name}: None at {holes}, expected at [1]"

    @pytest.mark.parametrize("missing", [{(e, "w3") for e in range(3)}, set()], ids=["no up", "an up"])
    def test_experts_that_are_not_gated_have_their_first_part_for_an_up(self, missing):
        loras = experts(3, missing)
        for lora in loras[0::3]:
            lora.scaling = 5

        packed = pack_moe(loras, is_non_gated_moe=True)

        for tensors in (packed.lora_a, packed.lora_b):
            assert tensors[2] is tensors[0], "the very tensor: a copy would take memory, and nobody reads it"
        assert packed.scaling[0] == 5 and packed.scaling[2] == 1

    @pytest.mark.parametrize("missing", ["w1 w3", "w1"], ids=["on w2 alone", "on w2 and an up"])
    def test_experts_that_are_not_gated_may_have_adapters_without_the_first_part(self, missing):
        loras = experts(3, {(e, part) for e in range(3) for part in missing.split()})

        packed = pack_moe(loras, is_non_gated_moe=True)

        assert [part is None for part in packed.parts] == [True, False, True], "only w2 has an adapter"
        for expert, lora in enumerate(loras[1::3]):
            assert_rows_equal(
                packed.lora_a[1][expert, : lora.rank], lora.lora_a, what=f"A of expert {expert}"
            )
            assert_rows_equal(packed.lora_b[1][expert, :, : lora.rank], lora.lora_b, what=f"B of {expert}")
        assert packed.rank == max(lora.rank for lora in loras[1::3])

    def test_an_adapter_on_an_up_that_the_experts_do_not_have_is_none(self):
        loras = experts(2, {(e, part) for e in range(2) for part in ("w1", "w2")})

        with pytest.raises(ValueError, match=r"mlp\.experts: "):
            pack_moe(loras, is_non_gated_moe=True)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_keeps_the_dtype(self, dtype):
        packed = pack_moe(experts(2, {(1, "w1")}, dtype))

        assert {tensor.dtype for tensor in packed.tensors} == {dtype}

    def test_leaves_the_tensors_of_the_parts_to_whoever_shares_them(self):
        loras = experts(2)
        before = [(lora.lora_a.clone(), lora.lora_b) for lora in loras]
        copies = [b.clone() for _, b in before]

        pack_moe(loras).lora_a[0].zero_()

        for lora, (a, b), copy in zip(loras, before, copies, strict=True):
            assert_rows_equal(lora.lora_a, a, what=f"A of {lora.module_name}, which was packed")
            assert_rows_equal(b, copy, what=f"B of {lora.module_name}, as somebody else holds it")

    @pytest.mark.parametrize(
        "loras", [experts(2)[:5], experts(2)[:1], [None] * 6, []], ids=["5", "1", "6 times None", "none"]
    )
    def test_refuses_what_is_not_three_parts_an_expert(self, loras):
        with pytest.raises(ValueError, match=r"mlp\.experts"):
            pack_moe(loras)


def test_scaling_is_alpha_over_rank_unless_given():
    pair = torch.ones(4, 6), torch.ones(5, 4)

    assert LoRALayerWeights("q_proj", 4, 6, *pair).scaling == 1.5
    assert LoRALayerWeights("q_proj", 4, 6, *pair, scaling=9).scaling == 9


def test_scaling_of_packed_parts_is_each_ones_alpha_over_its_own_rank_unless_given():
    lora_a = [torch.ones(2, 6), None, torch.ones(4, 6)]
    lora_b = [torch.ones(5, 2), None, torch.ones(3, 4)]

    assert PackedLoRALayerWeights("qkv_proj", 4, [6, None, 6], lora_a, lora_b).scaling == [3, None, 1.5]


def test_sizes_are_those_of_the_tensors():
    weights = random_weights(rank=3, width_in=7, width_out=5, dtype=torch.bfloat16)
    packed = PackedLoRALayerWeights.pack([weights, None])

    assert (weights.input_dim, weights.output_dim, weights.is_packed) == (7, 5, False)
    for of_module in (weights, packed):
        assert sum(tensor.nbytes for tensor in of_module.tensors) == 2 * (3 * 7 + 5 * 3)


def test_from_config_takes_alpha_and_scaling_of_the_module():
    helper = PEFTHelper.from_dict(good_config(r=4, lora_alpha=8, alpha_pattern={"layers.1.q_proj": 12}))

    plain = LoRALayerWeights.from_config("layers.0.q_proj", helper)
    patterned = LoRALayerWeights.from_config("layers.1.q_proj", helper, rank=3)

    assert (plain.module_name, plain.rank, plain.lora_alpha, plain.scaling) == ("layers.0.q_proj", 4, 8, 2)
    assert (patterned.rank, patterned.lora_alpha, patterned.scaling) == (3, 12, 4)
    assert plain.lora_a is None and plain.lora_b is None


def test_dummy_weights_have_the_shapes_of_real_ones_and_change_nothing():
    dummy = LoRALayerWeights.create_dummy_lora_weights("q_proj", 7, 5, 3, torch.bfloat16, "cpu")

    assert (dummy.lora_a.shape, dummy.lora_b.shape) == ((3, 7), (5, 3))
    assert dummy.lora_a.dtype == dummy.lora_b.dtype == torch.bfloat16
    assert not (dummy.lora_b @ dummy.lora_a).any()
    assert dummy.rank == 3 and dummy.scaling == 1
