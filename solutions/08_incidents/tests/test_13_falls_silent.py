"""Hunt 8.13. Three adapters in three slots and a base row, on the kernels."""

import torch

from tests.worlds.hunts import SmallLinear


def test_every_slot_is_served_beside_base_rows():
    linear = SmallLinear(slots=3, backend="triton", dtype=torch.float32)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))

    for ids in ([0, 3, 1, 2], [1, 2, 3, 3]):
        torch.testing.assert_close(linear.rows(x, ids), linear.answer(x, ids))
