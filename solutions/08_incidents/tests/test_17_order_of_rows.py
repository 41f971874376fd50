"""Hunt 8.17. The rows of a batch in another order."""

import torch

from tests.worlds.hunts import SmallLinear


def test_the_order_of_rows_changes_no_row():
    linear = SmallLinear()
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    for ids in ([1, 1, 2, 2, 3, 3], [3, 1, 2, 1, 3, 2], [1, 2, 1, 1, 3, 1]):
        torch.testing.assert_close(linear.rows(x, ids), linear.answer(x, ids))
