"""The GPU's backend that folds A into the base weight. Beside vllm/lora/punica_wrapper/punica_gpu.py, not in vLLM."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.gpu.kernels.update import DeferredUpdate, Update
from minivllm.gpu.sgmv import expand
from minivllm.gpu.sgmv.tuning import FEW_TOKENS, fold_pays
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.gpu.triton_slots import TritonSlots
from minivllm.layers.linear import LinearBase
from minivllm.lora.slots import Slots

# Rows of y and of the folded weight begin at multiples of so many elements: 16 bytes, as matrix products want them.
ALIGNMENT = 8


class FoldedSlots(TritonSlots):
    """Slots whose A's are the last rows of the base weight.

    wide     weight and bias of base and A's together
    columns  N
    """

    def __init__(
        self,
        slots: Slots,
        outdate: Callable[[Iterable[int]], None],
        a: list[torch.Tensor],
        wide: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        super().__init__(slots, outdate, a)
        self.wide, self.columns = wide, sum(b.shape[2] for b in self.b)

    @property
    def memory(self) -> list[torch.Tensor]:
        return [*super().memory, *(tensor for tensor in self.wide if tensor is not None)]


class FoldedBackend(TritonBackend):
    """Every slot's A as further rows of the base weight, so that one product gives base and shrink together.

        W  (N + S * n * R, K)   the base weight, then slot by slot and slice by slice the A's

    The shrink then needs no launch of its own, and reads x no second time; each row has its h for every slot, and
    the expand picks the one it wants. The price is S * n * R more columns for every row, also where it uses none: where
    that costs more than a shrink (`fold_pays`), the SGMV kernels run on the very same buffers. A batch without
    adapters multiplies by the first N rows and pays nothing. Not in vLLM.
    """

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        """Base linears that compute something else than x · Wᵀ + b stay whole."""
        if base is None or type(base).forward is not LinearBase.forward:
            return super().place(slots, base)
        if not base.weight.numel():
            raise ValueError(
                "the folded backend needs the base weight itself, which a CPU in float32 has packed; use grouped"
            )
        if base.weight.dtype != slots.a[0].dtype:
            raise ValueError(
                f"the folded backend keeps adapters in the base weight's dtype {base.weight.dtype}, but lora_dtype is "
                f"{slots.a[0].dtype}; leave it on auto or take another punica backend"
            )
        count, _, rank, width = slots.a[0].shape
        n, height = len(slots.a), base.output_size_per_partition
        folded = count * n * rank
        wide, wide_bias = _widen(base, -(-(height + folded) // ALIGNMENT) * ALIGNMENT)
        a = wide[height : height + folded].view(count, n, rank, width)
        by_slice = [a[:, i : i + 1] for i in range(n)]  # n x (S, 1, R, K)
        return self._keep(FoldedSlots(slots, self.live_ranks.outdate, by_slice, (wide, wide_bias)))

    def linear(self, x: torch.Tensor, base: LinearBase, slots: TritonSlots) -> torch.Tensor:
        y, update = self._product(x, base, slots)
        if update is not None:
            update.add_to(y)
        return y

    def linear_deferred(
        self, x: torch.Tensor, base: LinearBase, slots: TritonSlots
    ) -> tuple[torch.Tensor, DeferredUpdate | None]:
        """Of more than FEW_TOKENS an update of several slices is added here: kernels that do so were not measured."""
        y, update = self._product(x, base, slots)
        if update is not None and len(x) > FEW_TOKENS and len(slots.a) > 1:
            update.add_to(y)
            return y, None
        return y, update

    def _product(
        self, x: torch.Tensor, base: LinearBase, slots: TritonSlots
    ) -> tuple[torch.Tensor, DeferredUpdate | None]:
        """y, and what is still to be added to it."""
        if self.no_lora or not isinstance(slots, FoldedSlots):
            return super().linear(x, base, slots), None
        count, _, rank, width = slots.a[0].shape
        n, columns = len(slots.a), slots.columns
        if not fold_pays(len(x), count, n * rank, width):
            return super().linear(x, base, slots), None
        wide = F.linear(x, *slots.wide)  # (T, N + S * n * R)
        y, h = wide[:, :columns], wide[:, columns:]
        h = h[:, : n * rank].unflatten(1, (n, rank)).transpose(0, 1)  # (n, T, R): slot 0's
        tiles = self.token_meta.meta_args(len(x))
        return y, DeferredUpdate(
            Update.of_slots(h, slots.flat_b, slots.expand_ranks, n * rank),
            tiles,
            self.token_slots(len(x)),
            lambda y: expand(h[None], slots.flat_b, y, tiles, slots.expand_ranks, h_slot_stride=n * rank),
        )


def _widen(base: LinearBase, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move a base linear's weight and bias to the beginning of longer ones, zeros past them, and give these."""
    wide = base.weight.new_zeros(rows, base.input_size_per_partition)
    wide[: base.output_size_per_partition] = base.weight
    base.weight = nn.Parameter(wide[: base.output_size_per_partition], requires_grad=False)
    if base.bias is None:
        return wide, None
    wide_bias = base.bias.new_zeros(rows)
    wide_bias[: base.output_size_per_partition] = base.bias
    base.bias = nn.Parameter(wide_bias[: base.output_size_per_partition], requires_grad=False)
    return wide, wide_bias
