"""The linear layers of a base model. Stands for vllm/model_executor/layers/linear.py (v0.22.1)."""

import functools
from collections.abc import Callable
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.ranks import ONE_RANK, Ranks

# (x (..., K), weight (N, K), bias (N,) or None) -> (..., N), as `F.linear`
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LinearBase(nn.Module):
    """y = x W^T + b, with weight (N, K) as checkpoints store it (vLLM: LinearBase).

    A process may have a part of the weight: of each of the n linears that the layer fuses some rows, and some columns.

    prefix: the layer's name in the model, for people.
    is_head: whether it makes logits; what adapts it is not what adapts linears inside the model.
    heights, rows: N of each of the n linears, and which of its rows the process has.
    columns: which of K it has.
    tp: the process.
    product: computes x W^T + b.
    """

    is_head = False
    heights: list[int]
    rows: list[slice]
    columns: slice

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        prefix: str = "",
        tp: Ranks = ONE_RANK,
        product: Product = F.linear,
    ) -> None:
        super().__init__()
        self.prefix, self.tp = prefix, tp
        self.input_size = input_size
        self.output_size = output_size
        self._take_part()
        shape = self.output_size_per_partition, self.input_size_per_partition
        self.weight = _parameter(shape, params_dtype, device)
        self.bias = _parameter(shape[:1], params_dtype, device) if bias else None
        self.packed_weight: torch.Tensor | None = None
        self.product = product

    tp_rank, tp_size = property(attrgetter("tp.rank")), property(attrgetter("tp.size"))

    def _take_part(self) -> None:
        """Say which `rows` and `columns` the process has: all."""
        self.heights, self.rows = [self.output_size], [slice(0, self.output_size)]
        self.columns = slice(0, self.input_size)

    @property
    def output_partition_sizes(self) -> list[int]:
        """Rows of each linear that are here (vLLM: the same name)."""
        return [rows.stop - rows.start for rows in self.rows]

    @property
    def output_size_per_partition(self) -> int:
        return sum(self.output_partition_sizes)

    @property
    def input_size_per_partition(self) -> int:
        return self.columns.stop - self.columns.start

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x: (T, K) -> (T, N), None: vLLM's second is a bias to be added later, which nobody asks for here"""
        if self.packed_weight is None:
            return self.product(x, self.weight, self.bias), None
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], ""), None

    def pack(self) -> None:
        """Reorder a float32 CPU weight for oneDNN, two to four times faster than PyTorch's own product.

        The plain weight is dropped, so as not to hold it twice: `weight` is empty afterwards. Call it when
        weights are loaded. Elsewhere (other dtypes and devices, another `product`, quantized weights, a PyTorch
        without oneDNN) it does nothing.
        """
        weight = self.weight
        if (
            self.product is not F.linear
            or type(weight) is not nn.Parameter
            or weight.device.type != "cpu"
            or weight.dtype != torch.float32
            or not weight.numel()
            or not can_pack()
        ):
            return
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def extra_repr(self) -> str:
        return f"in={self.input_size}, out={self.output_size}, bias={self.bias is not None}"


class ReplicatedLinear(LinearBase):
    """A linear that every process has whole (vLLM: ReplicatedLinear)."""


class ColumnParallelLinear(LinearBase):
    """A linear whose outputs processes share out (vLLM: ColumnParallelLinear)."""

    def _take_part(self) -> None:
        self.heights = getattr(self, "output_sizes", [self.output_size])
        self.rows = [self.tp.part_of(n, f"{self.prefix} outputs") for n in self.heights]
        self.columns = slice(0, self.input_size)


class RowParallelLinear(LinearBase):
    """A linear whose inputs processes share out, so that each has a term of a sum.

    `forward` gives the process's own term, because adapters add to terms; the block that the layer ends sums them
    (`Ranks.all_reduce`). vLLM: RowParallelLinear with `reduce_results=False`. The bias belongs to one term, the first
    process's; others have zeros.
    """

    def _take_part(self) -> None:
        self.heights, self.rows = [self.output_size], [slice(0, self.output_size)]
        self.columns = self.tp.part_of(self.input_size, f"{self.prefix} inputs")


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several linears of one input in one product, such as gate and up (vLLM: MergedColumnParallelLinear).

    output_sizes: N of each slice, in the order of the model's packed_modules_mapping.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        prefix: str = "",
        tp: Ranks = ONE_RANK,
        product: Product = F.linear,
    ) -> None:
        self.output_sizes = list(output_sizes)
        super().__init__(input_size, sum(output_sizes), bias, params_dtype, device, prefix, tp, product)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v in one product (vLLM: QKVParallelLinear); output_sizes: [Hq*D, Hkv*D, Hkv*D].

    num_heads, num_kv_heads: of the process.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        prefix: str = "",
        tp: Ranks = ONE_RANK,
        product: Product = F.linear,
    ) -> None:
        self.head_size = head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        q_size, kv_size = self.total_num_heads * head_size, self.total_num_kv_heads * head_size
        self.output_sizes = [q_size, kv_size, kv_size]
        super().__init__(hidden_size, q_size + 2 * kv_size, bias, params_dtype, device, prefix, tp, product)

    def _take_part(self) -> None:
        q = self.tp.part_of(self.total_num_heads, "num_attention_heads")
        kv = self.tp.kv_heads(self.total_num_kv_heads)
        self.num_heads, self.num_kv_heads = q.stop - q.start, kv.stop - kv.start
        self.heights, self.columns = self.output_sizes, slice(0, self.input_size)
        size = self.head_size
        self.rows = [slice(heads.start * size, heads.stop * size) for heads in (q, kv, kv)]


@functools.cache
def can_pack() -> bool:
    """Whether this PyTorch has the private oneDNN operators, and they compute a linear."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    weight, x = torch.arange(15.0).view(3, 5), torch.arange(10.0).view(2, 5)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(y, x @ weight.T)


def _parameter(
    shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    """Uninitialised: the loader fills every parameter or raises."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
