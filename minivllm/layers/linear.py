"""The linear layers of a base model. Stands for vllm/model_executor/layers/linear.py (v0.22.1)."""

import functools

import torch
import torch.nn.functional as F
from torch import nn


class LinearBase(nn.Module):
    """y = x W^T + b, with weight (N, K) as checkpoints store it (vLLM: LinearBase).

    There is one tensor-parallel rank; vLLM's attributes for ranks stay, since LoRA layers read them.
    prefix: the layer's name in the model, for people.
    is_head: whether it makes logits; what adapts it is not what adapts linears inside the model.
    read_by: the activation that alone reads its output, if there is one; what adds to the output may do so there.
    """

    is_head = False
    read_by: nn.Module | None = None
    tp_size = 1
    tp_rank = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.input_size = input_size
        self.output_size = output_size
        self.weight = _parameter((output_size, input_size), params_dtype, device)
        self.bias = _parameter((output_size,), params_dtype, device) if bias else None
        self.packed_weight: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x: (T, K) -> (T, N), None: vLLM's second is a bias to be added later, which nobody asks for here"""
        if self.packed_weight is None:
            return F.linear(x, self.weight, self.bias), None
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], ""), None

    def pack(self) -> None:
        """Reorder a float32 CPU weight for oneDNN, two to four times faster than PyTorch's own product.

        The plain weight is dropped, so as not to hold it twice: `weight` is empty afterwards. Call it when
        weights are loaded. Elsewhere (other dtypes and devices, quantized weights, a PyTorch without oneDNN) it does
        nothing.
        """
        weight = self.weight
        if (
            type(weight) is not nn.Parameter
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
    """A linear that every rank would hold whole (vLLM: ReplicatedLinear)."""


class ColumnParallelLinear(LinearBase):
    """A linear whose outputs ranks would share out (vLLM: ColumnParallelLinear)."""


class RowParallelLinear(LinearBase):
    """A linear whose inputs ranks would share out (vLLM: RowParallelLinear)."""


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
    ) -> None:
        super().__init__(input_size, sum(output_sizes), bias, params_dtype, device, prefix)
        self.output_sizes = list(output_sizes)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v in one product (vLLM: QKVParallelLinear); output_sizes: [Hq*D, Hkv*D, Hkv*D]."""

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
    ) -> None:
        self.head_size = head_size
        self.total_num_heads = self.num_heads = total_num_heads
        self.total_num_kv_heads = self.num_kv_heads = total_num_kv_heads or total_num_heads
        q_size, kv_size = self.num_heads * head_size, self.num_kv_heads * head_size
        super().__init__(hidden_size, q_size + 2 * kv_size, bias, params_dtype, device, prefix)
        self.output_sizes = [q_size, kv_size, kv_size]


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
