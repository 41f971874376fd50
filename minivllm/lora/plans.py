"""What is known of an adapter before its numbers are read, and how they are then read at once.

vLLM 0.22.1 goes through the names of every file (`from_local_checkpoint`, vllm/lora/lora_model.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, TypeVar

import torch
from torch._utils import _unflatten_dense_tensors

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.scattered_reads import new_memory, read_into
from minivllm.lora.wrapping import WrappedModules

ALIGNMENT = 16  # bytes, as of a slot writer's pieces

T = TypeVar("T", LoRALayerWeights, PackedLoRALayerWeights, None)


@dataclass(eq=False)
class AdapterPlan:
    """An adapter without its numbers: all that adapters of the same header and config have in common.

    judged    its weights as shapes ("meta"), which fit the model
    in_order  the tensors of its file in their order there, likewise
    start     offset of the first of these in the file, which the others follow without gaps; None: not so
    wrapped   the model's layers
    table     of an adapter's places in a slot writer's pool, once there was one
    """

    judged: LoRAModel
    in_order: list[torch.Tensor]
    start: int | None
    wrapped: WrappedModules
    table: torch.Tensor | None = None

    @cached_property
    def packed(self) -> LoRAModel | None:
        """The adapter as slots take it, if its tensors are those of the file, each once, and all of one dtype.

        None: packing makes others, such as the stacked weights of experts.
        """
        judged, dtypes = self.judged, {tensor.dtype for tensor in self.in_order}
        if self.start is None or len(dtypes) != 1 or judged.beside or not self._has_all(judged):
            return None
        packed = LoRAModel(1, judged.rank, {name: _copy(weights) for name, weights in judged.loras.items()})
        for weights in packed.loras.values():
            weights.scaling = 1  # else packing would make another B, which nobody knows from where it came
        self.wrapped.accept(packed)
        return packed if self._has_all(packed) else None  # of ranks in a group each has a part

    @cached_property
    def _order(self) -> dict[int, int]:
        """id of a tensor of the file -> its number there."""
        return {id(tensor): number for number, tensor in enumerate(self.in_order)}

    @cached_property
    def _count(self) -> int:
        """Numbers of all tensors of the file."""
        return sum(tensor.numel() for tensor in self.in_order)

    @cached_property
    def _scaled(self) -> dict[float, list[int]]:
        """Scaling other than 1 -> numbers of its B's in the file."""
        scaled: dict[float, list[int]] = {}
        for weights in self.judged.loras.values():
            if weights.scaling != 1:
                scaled.setdefault(weights.scaling, []).append(self._order[id(weights.lora_b)])
        return scaled

    def fill(
        self, file: BinaryIO, lora_model_id: int, dtype: torch.dtype, slot_writer: Any
    ) -> LoRAModel | None:
        """The accepted adapter with the numbers of a file; staged, too, where there is a slot writer.

        None where `packed` is None, and for numbers that must be judged tensor by tensor: NaN, Inf, and what is so
        large that a scaling might make it Inf.
        """
        if self.packed is None or not self._is_aligned(dtype, slot_writer):
            return None
        count, stored = self._count, self.in_order[0].dtype
        nbytes = count * dtype.itemsize
        pool = new_memory(nbytes) if slot_writer is None else slot_writer.take(nbytes)
        room = pool if slot_writer is None else slot_writer.weights_in(pool)
        numbers = room.view(dtype)[:count]
        if stored == dtype:
            read = numbers
            read_into(file, self.start, numbers.view(torch.uint8))
        else:
            read = new_memory(count * stored.itemsize).view(stored)[:count]
            read_into(file, self.start, read.view(torch.uint8))
        if not self._are_finite(read, dtype):
            return None
        if read is not numbers:
            numbers.copy_(read)
        lora = self._with_numbers(lora_model_id, numbers)
        if slot_writer is not None:
            self.table = slot_writer.keep(lora, pool, self.table)
        return lora

    def _has_all(self, lora: LoRAModel) -> bool:
        """Whether an adapter's A's and B's are the file's tensors and no others, each once, and nothing is beside B."""
        held = [id(tensor) for part in _parts(lora.loras.values()) for tensor in part.tensors]
        return sorted(held) == sorted(self._order)

    def _is_aligned(self, dtype: torch.dtype, slot_writer: Any) -> bool:
        if slot_writer is None:
            return True
        return all(tensor.numel() * dtype.itemsize % ALIGNMENT == 0 for tensor in self.in_order)

    def _are_finite(self, numbers: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether none is NaN or Inf in this dtype, nor once scaled."""
        smallest, largest = (end.to(dtype).item() for end in torch.aminmax(numbers))
        factor = max(map(abs, [1.0, *self._scaled]))
        return max(-smallest, largest) * factor <= torch.finfo(dtype).max

    def _with_numbers(self, lora_model_id: int, numbers: torch.Tensor) -> LoRAModel:
        """An accepted adapter, whose B's are scaled here.   numbers: of all tensors, in the order of the file"""
        tensors = _unflatten_dense_tensors(numbers, self.in_order)  # views, made by one call
        for scaling, of in self._scaled.items():
            # As `B * scaling`: a number in the place of this tensor would first be rounded to B's dtype.
            factor = torch.tensor(scaling, dtype=torch.float64)
            torch._foreach_mul_([tensors[number] for number in of], factor)
        loras = {name: _copy(weights) for name, weights in self.packed.loras.items()}
        for part in _parts(loras.values()):
            part.lora_a = tensors[self._order[id(part.lora_a)]]
            part.lora_b = tensors[self._order[id(part.lora_b)]]
            part.beside = {}
        lora = LoRAModel(lora_model_id, self.packed.rank, loras)
        lora.is_accepted = True
        return lora


def _parts(weights: Iterable[Any]) -> Iterator[LoRALayerWeights]:
    return (part for each in weights for part in each.parts if part is not None)


def _copy(weights: T) -> T:
    """With parts of its own. `copy.copy` takes five times as long."""
    if weights is None:
        return None
    copied = object.__new__(type(weights))
    vars(copied).update(vars(weights))
    if isinstance(weights, PackedLoRALayerWeights):
        copied.parts = [_copy(part) for part in weights.parts]
    return copied
