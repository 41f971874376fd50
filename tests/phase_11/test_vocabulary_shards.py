"""Shards of a vocabulary (lab 11.3). The oracle: rows of whole tables."""

import pytest
import torch

from minivllm.parallel.tensor_parallel import TensorParallel
from tests.worlds.ranks import in_lockstep

pytestmark = pytest.mark.lab("11.3")

# V and processes: even, uneven, a last process with nothing, several with nothing, one that has all.
CASES = [(6, 2), (7, 2), (7, 3), (4, 3), (5, 8), (5, 1)]
S, R, H = 3, 2, 4
cases = pytest.mark.parametrize(("vocabulary", "size"), CASES)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def padded(table, size):
    """(V, ...) -> (size, share, ...), by a loop: what each process has, NaN past the end."""
    share = -(-len(table) // size)
    parts = table.new_full((size, share, *table.shape[1:]), float("nan"))
    for token, row in enumerate(table):
        parts[token // share, token % share] = row
    return parts


class TestOwnTokens:
    @cases
    @pytest.mark.parametrize("shape", [(), (H,), (H, 2)])
    def test_are_a_run_of_rows_and_zeros_past_the_last(self, vocabulary, size, shape):
        table = normal(vocabulary, *shape)

        parts = [TensorParallel(rank, size).own_tokens(table) for rank in range(size)]

        assert torch.equal(torch.stack(parts), padded(table, size).nan_to_num(0))

    def test_have_the_dtype_of_the_table(self):
        assert TensorParallel(1, 2).own_tokens(torch.arange(3, dtype=torch.int16)).dtype == torch.int16


class TestLookUp:
    @cases
    def test_terms_add_up_to_the_rows_of_the_whole_table(self, vocabulary, size):
        table, ids = normal(vocabulary, H), torch.tensor([0, vocabulary - 1, 2, 2, vocabulary // 2])
        parts = padded(table, size)

        results = in_lockstep(size, lambda tp: tp.look_up(ids, parts[tp.rank]))

        for found in results:
            assert torch.equal(found, table[ids])

    def test_a_term_is_zeros_where_the_token_is_anothers(self):
        table, ids = normal(7, H), torch.tensor([6, 0, 3, 5])
        parts = padded(table, 2)

        first, second = (TensorParallel(rank, 2).look_up_own(ids, parts[rank]) for rank in (0, 1))

        assert torch.equal(first, torch.stack([0 * table[0], table[0], table[3], 0 * table[0]]))
        assert torch.equal(second, torch.stack([table[6], 0 * table[0], 0 * table[0], table[5]]))

    def test_the_ids_stay_as_they_were(self):
        ids = torch.tensor([6, 0, 3])

        TensorParallel(0, 2).look_up_own(ids, normal(4, H))

        assert ids.tolist() == [6, 0, 3]


class TestLookUpInSlots:
    """Each row in its slot's table, where base tokens are shared out and added ones are not."""

    @cases
    @pytest.mark.parametrize("extra", [0, 2])
    def test_terms_add_up_to_the_rows_of_each_slots_table(self, vocabulary, size, extra):
        whole = normal(S, vocabulary + extra, R)
        last = vocabulary + extra - 1
        ids = torch.tensor([0, last, vocabulary - 1, 1, 1, last, 2])
        slots = torch.tensor([2, 1, 0, 0, 2, 2, 1])
        own, added = whole.split([vocabulary, extra], dim=1)
        tables = [
            torch.cat([padded(table, size)[rank] for table in own]).view(S, -1, R) for rank in range(size)
        ]

        terms = [
            TensorParallel(rank, size).look_up_own_in(
                ids, torch.cat([tables[rank], added], 1), slots, vocabulary
            )
            for rank in range(size)
        ]

        assert torch.equal(sum(terms), whole[slots, ids])

    def test_added_tokens_are_the_first_processs_though_all_have_them(self):
        tables = normal(S, 3 + 2, R)  # three of six tokens, two that are added
        ids, slots = torch.tensor([6, 7, 5]), torch.tensor([1, 0, 2])

        first, second = (
            TensorParallel(rank, 2).look_up_own_in(ids, tables, slots, vocabulary=6) for rank in (0, 1)
        )

        assert torch.equal(first, torch.stack([tables[1, 3], tables[0, 4], 0 * tables[0, 0]]))
        assert torch.equal(second, torch.stack([0 * tables[0, 0], 0 * tables[0, 0], tables[2, 2]]))


class TestGatherTokens:
    @cases
    @pytest.mark.parametrize("extra", [0, 3])
    def test_every_process_has_all_logits_in_the_order_of_tokens(self, vocabulary, size, extra):
        logits = normal(2, vocabulary + extra)
        own, added = logits.split([vocabulary, extra], dim=1)
        parts = padded(own.T, size).transpose(1, 2)  # (size, P, share), NaN where they stand for no token

        results = in_lockstep(
            size, lambda tp: tp.gather_tokens(torch.cat([parts[tp.rank], added], 1), vocabulary)
        )

        for found in results:
            assert torch.equal(found, logits)

    def test_only_the_processs_own_tokens_travel(self):
        def work(tp):
            tp.gather_tokens(normal(2, 4 + 3), vocabulary=7)
            return tp.calls

        assert in_lockstep(2, work) == [[("all_gather", 2 * 4)]] * 2
