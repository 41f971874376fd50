"""Slice an adapter for a rank (lab 11.1). The oracle: whole matrices in float64, put together from parts."""

import pytest
import torch

from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.parallel.adapter_share import ALL, EVERYTHING, Cut, share_of_linear
from minivllm.parallel.tensor_parallel import TensorParallel

pytestmark = pytest.mark.lab("11.1")

K, R, T = 12, 3, 4


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pair(width, height, seed=0, **beside):
    return LoRALayerWeights(
        "m", R, R, normal(R, width, seed=seed), normal(height, R, seed=seed + 1), beside=beside
    )


def linears(make, size):
    """The same linear on each of so many processes."""
    return [make(TensorParallel(rank, size)) for rank in range(size)]


def own_shares(made, parts):
    """What each process has of the same adapter."""
    return [share_of_linear(linear, len(parts)).of(parts) for linear in made]


def delta(part, x):
    return x @ part.lora_a.T @ part.lora_b.T


def merged(tp):
    return MergedColumnParallelLinear(K, [6, 18], tp=tp)


def qkv(tp):
    """Four heads of queries, two of keys and values, three wide."""
    return QKVParallelLinear(K, 3, 4, 2, tp=tp)


class TestOfAColumnParallelLinear:
    @pytest.mark.parametrize("size", [2, 3])
    def test_outputs_of_all_processes_stand_side_by_side(self, size):
        x, adapter = normal(T, K), pair(K, 18)
        made = linears(lambda tp: ColumnParallelLinear(K, 18, tp=tp), size)

        own = own_shares(made, [adapter])

        together = torch.cat([delta(part, x) for (part,) in own], dim=1)
        torch.testing.assert_close(together, delta(adapter, x))
        assert [part.lora_b.shape for (part,) in own] == [(18 // size, R)] * size

    def test_each_slice_of_a_merged_one_is_cut_by_itself(self):
        x, gate, up = normal(T, K), pair(K, 6), pair(K, 18, seed=3)

        first, second = own_shares(linears(merged, 2), [gate, up])

        for i, whole in enumerate((gate, up)):
            together = torch.cat([delta(first[i], x), delta(second[i], x)], dim=1)
            torch.testing.assert_close(together, delta(whole, x))

    @pytest.mark.parametrize("make", [merged, qkv])
    def test_one_adapter_for_all_of_a_fused_one_follows_the_rows_of_the_base(self, make):
        x, made = normal(T, K), linears(make, 2)
        adapter = pair(K, made[0].output_size)
        whole = delta(adapter, x).split(made[0].output_sizes, dim=1)

        own = own_shares(made, [adapter])

        for linear, (part,) in zip(made, own, strict=True):
            expected = [of_one[:, rows] for of_one, rows in zip(whole, linear.rows, strict=True)]
            torch.testing.assert_close(delta(part, x), torch.cat(expected, dim=1))

    @pytest.mark.parametrize("make", [merged, qkv])
    def test_the_bias_of_one_adapter_for_all_of_a_fused_one_follows_them_too(self, make):
        made = linears(make, 2)
        bias = normal(1, made[0].output_size)
        whole = bias.split(made[0].output_sizes, dim=1)

        own = own_shares(made, [pair(K, made[0].output_size, bias=bias)])

        for linear, (part,) in zip(made, own, strict=True):
            expected = [of_one[:, rows] for of_one, rows in zip(whole, linear.rows, strict=True)]
            torch.testing.assert_close(part.beside["bias"], torch.cat(expected, dim=1), rtol=0, atol=0)

    def test_processes_with_the_same_keys_and_values_have_the_same_of_the_adapter(self):
        parts = [pair(K, 12), pair(K, 6, seed=3), pair(K, 6, seed=5)]

        own = own_shares(linears(qkv, 4), parts)

        for i in (1, 2):
            heads = parts[i].lora_b.chunk(2)
            for rank in range(4):
                assert torch.equal(own[rank][i].lora_b, heads[rank // 2])
        assert torch.equal(torch.cat([part.lora_b for part, _, _ in own]), parts[0].lora_b)

    def test_its_a_is_the_adapters_own_tensor_on_every_process(self):
        adapter = pair(K, 6)

        own = own_shares(linears(lambda tp: ColumnParallelLinear(K, 6, tp=tp), 2), [adapter])

        assert all(part.lora_a is adapter.lora_a for (part,) in own)

    def test_a_bias_goes_by_the_rows_of_b(self):
        bias = normal(1, 18)

        own = own_shares(linears(lambda tp: ColumnParallelLinear(K, 18, tp=tp), 3), [pair(K, 18, bias=bias)])

        assert torch.equal(torch.cat([part.beside["bias"] for (part,) in own], dim=1), bias)


class TestOfARowParallelLinear:
    @pytest.mark.parametrize("size", [2, 4])
    def test_terms_of_all_processes_add_up(self, size):
        x, adapter = normal(T, K), pair(K, 10)
        made = linears(lambda tp: RowParallelLinear(K, 10, tp=tp), size)

        own = own_shares(made, [adapter])

        terms = [delta(part, x[:, linear.columns]) for linear, (part,) in zip(made, own, strict=True)]
        torch.testing.assert_close(sum(terms), delta(adapter, x))
        assert [part.lora_a.shape for (part,) in own] == [(R, K // size)] * size

    def test_its_b_and_its_bias_are_whole_on_every_process(self):
        adapter = pair(K, 10, bias=normal(1, 10))

        own = own_shares(linears(lambda tp: RowParallelLinear(K, 10, tp=tp), 2), [adapter])

        for (part,) in own:
            assert part.lora_b is adapter.lora_b
            assert torch.equal(part.beside["bias"], adapter.beside["bias"])


class TestOfEveryLinear:
    def test_one_that_every_process_has_whole_takes_the_whole_adapter(self):
        adapter = pair(K, 8)

        own = own_shares(linears(lambda tp: ReplicatedLinear(K, 8, tp=tp), 2), [adapter])

        assert all(part.lora_a is adapter.lora_a and part.lora_b is adapter.lora_b for (part,) in own)

    def test_alone_a_process_has_everything(self):
        assert share_of_linear(ColumnParallelLinear(K, 8, tp=TensorParallel(0, 1)), 1) is EVERYTHING

    @pytest.mark.parametrize(("make", "slices"), [(merged, 2), (merged, 1), (qkv, 3)])
    def test_the_sizes_foretold_are_those_of_what_a_process_gets(self, make, slices):
        for linear in linears(make, 2):
            heights = linear.output_sizes if slices > 1 else [linear.output_size]
            parts = [pair(K, height) for height in heights]
            share = share_of_linear(linear, slices)

            own = share.of(parts)

            found = [(part.lora_a.shape[1], part.lora_b.shape[0]) for part in own]
            assert found == share.sizes([(K, height) for height in heights])

    def test_what_an_adapter_lacks_stays_none(self):
        _, up = own_shares(linears(merged, 2), [None, pair(K, 18)])[1]

        first, _ = own_shares(linears(merged, 2), [None, pair(K, 18)])[0]
        assert first is None and up.lora_b.shape == (9, R)

    def test_the_adapter_itself_stays_as_it_was(self):
        adapter = pair(K, 10, bias=normal(1, 10))
        a, b, bias = adapter.lora_a, adapter.lora_b, adapter.beside["bias"]
        before = [t.clone() for t in (a, b, bias)]

        own_shares(linears(lambda tp: ColumnParallelLinear(K, 10, tp=tp), 2), [adapter])

        assert (adapter.lora_a is a, adapter.lora_b is b, adapter.beside["bias"] is bias) == (True,) * 3
        assert all(map(torch.equal, (a, b, bias), before))

    @pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
    def test_a_part_keeps_no_memory_of_the_whole(self, kind):
        ((part,), _) = own_shares(linears(lambda tp: kind(K, 8, tp=tp), 2), [pair(K, 8)])

        cut = part.lora_a if kind is RowParallelLinear else part.lora_b
        assert cut.untyped_storage().nbytes() == cut.nbytes

    @pytest.mark.parametrize("make", [lambda tp: ColumnParallelLinear(K, 24, tp=tp), merged, qkv])
    def test_a_bias_that_was_cut_keeps_no_memory_of_the_whole(self, make):
        made = linears(make, 2)
        adapter = pair(K, 24, bias=normal(1, 24))

        for (part,) in own_shares(made, [adapter]):
            bias = part.beside["bias"]
            assert bias.untyped_storage().nbytes() == bias.nbytes < adapter.beside["bias"].nbytes


class TestACut:
    def test_takes_some_ranks_of_a_where_adapters_are_fully_sharded(self):
        a = normal(4, K)

        of_all = Cut([ALL], [[ALL]], ranks=slice(2, 4)).of_a(0, a)
        of_some = Cut([slice(3, 7)], [[ALL]], ranks=slice(1, 3)).of_a(0, a)

        assert torch.equal(of_all, a[2:4])
        assert torch.equal(of_some, a[1:3, 3:7])
        for cut in (of_all, of_some):
            assert cut.untyped_storage().nbytes() == cut.nbytes, "it keeps memory of the whole"

    def test_takes_run_after_run_of_b_in_that_order(self):
        b = normal(9, R)

        own = Cut([ALL], [[slice(6, 8), slice(0, 3)]]).of_b(0, b)

        assert torch.equal(own, torch.stack([b[i] for i in (6, 7, 0, 1, 2)]))

    def test_hands_back_a_b_of_which_all_rows_are_wanted(self):
        b = normal(9, R)

        assert Cut([ALL], [(ALL,)]).of_b(0, b) is b

    def test_cuts_the_last_two_dimensions_whatever_stands_before_them(self):
        a, b = normal(5, 4, K), normal(5, 9, R)
        cut = Cut([slice(2, 6)], [[slice(1, 3), slice(7, 9)]])

        assert torch.equal(cut.of_a(0, a), a[:, :, 2:6])
        assert torch.equal(cut.of_b(0, b), b[:, [1, 2, 7, 8]])

    def test_of_experts_goes_through_its_slices_again_and_again(self):
        """Two slices an expert, three experts, of which the second has nothing for its first slice."""
        parts = [pair(K, 6, seed=i) for i in range(6)]
        parts[2] = None
        cut = Cut([ALL, slice(0, 6)], [[slice(3, 6)], [ALL]])

        own = cut.of(parts)

        assert own[2] is None and len(own) == 6
        for i in (0, 4):
            assert torch.equal(own[i].lora_b, parts[i].lora_b[3:6]) and own[i].lora_a is parts[i].lora_a
        for i in (1, 3, 5):
            assert torch.equal(own[i].lora_a, parts[i].lora_a[:, :6]) and own[i].lora_b is parts[i].lora_b

    def test_leaves_alone_what_is_beside_where_it_is_to(self):
        bias = normal(1, 8)

        (part,) = Cut([ALL], [[slice(0, 4)]], cuts_beside=False).of([pair(K, 8, bias=bias)])

        assert part.beside["bias"] is bias and part.lora_b.shape == (4, R)
