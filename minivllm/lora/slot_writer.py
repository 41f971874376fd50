"""Adapters into slots on a GPU: one transfer and one launch each, beside the steps that do not need them.

vLLM 0.22.1 copies tensor by tensor, on the stream that computes (`set_lora`, vllm/lora/layers/base_linear.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.wrapped_modules import WrappedModules

ALIGNMENT = 16  # bytes; a piece that begins at a multiple is read at full speed whatever its dtype


class SlotWriter:
    """Writes slots from page-locked memory, on a stream of its own.

    An adapter is one piece of memory: a table of where its A's and B's are, then these. It arrives in a buffer on
    the GPU, and one kernel brings everything from there to its place.

    Two orders are kept. A slot is written when the steps that may read it are through: those launched before the
    write or, inside `behind_step`, before the last `begin_step`. And a step that uses a slot waits until it is
    written; others do not.

    places     (P, 6) int64, see `write_slot`: A and B of every slice of every module
    written    slot -> event of its last write, until a step has waited for it
    """

    def __init__(self, wrapped: WrappedModules, device: torch.device | str) -> None:
        self.modules = wrapped.modules
        buffers = [
            buffer[:, 0]  # (S, rows, columns)
            for module in self.modules.values()
            for a_and_b in zip(module.lora_a_stacked, module.lora_b_stacked)
            for buffer in a_and_b
        ]
        self.dtype = buffers[0].dtype
        self.places = torch.tensor(
            [[b.data_ptr(), *b.stride(), *b.shape[1:]] for b in buffers], device=device
        )
        self.largest = max(buffer[0].numel() for buffer in buffers)
        self.table_bytes = _aligned(len(buffers) * 3 * torch.int64.itemsize)
        largest_adapter = sum(_aligned(buffer[0].nbytes) for buffer in buffers)
        self.arrived = torch.empty(self.table_bytes + largest_adapter, dtype=torch.uint8, device=device)
        self.written: dict[int, torch.cuda.Event] = {}
        self._behind_step = False
        self.on_gpu = self.arrived.is_cuda
        if self.on_gpu:
            self._stream, self._step = torch.cuda.Stream(device), torch.cuda.Event()

    # ---- memory ---------------------------------------------------------------------------------------------

    def take(self, lora: LoRAModel) -> None:
        """Move a packed adapter into one piece of page-locked memory, `lora.pool`; its tensors become views of it."""
        nbytes = sum(_aligned(p.numel() * self.dtype.itemsize) for p in self._pieces(lora) if p is not None)
        lora.pool = torch.empty(self.table_bytes + nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        _, room = self._split(lora.pool)
        used = 0
        first_of: dict[int, int] = {}  # address of a piece -> its first element in `room`

        def move(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal used
            place = room[used : used + tensor.numel()].view(tensor.shape)
            first_of[place.data_ptr()] = used
            used += _aligned(place.nbytes) // place.itemsize
            return place.copy_(tensor)

        for weights in lora.loras.values():
            weights.replace_tensors(move)
        table, _ = self._split(lora.pool)
        for row, piece in zip(table, self._pieces(lora)):
            present = piece is not None
            row.copy_(torch.tensor([first_of[piece.data_ptr()], *piece.shape] if present else [0, 0, 0]))

    def _pieces(self, lora: LoRAModel) -> Iterator[torch.Tensor | None]:
        """What belongs at each of `places`; None where the adapter has nothing."""
        for name, module in self.modules.items():
            weights = lora.get_lora(name)
            for i in range(module.n_slices):
                for tensors in (weights.lora_a, weights.lora_b) if weights else (None, None):
                    yield tensors[i] if isinstance(tensors, list) else tensors

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An adapter's memory, here or on the GPU, as its table (P, 3) and its weights (elements,)."""
        table = memory[: len(self.places) * 3 * torch.int64.itemsize].view(torch.int64)
        return table.view(-1, 3), memory[self.table_bytes :].view(self.dtype)

    # ---- slots ----------------------------------------------------------------------------------------------

    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy an adapter that was taken into one slot of every layer, zeros past its ranks."""
        from minivllm.lora.ops.triton_ops.write_slot_op import write_slot  # Triton is not everywhere

        with self._beside_steps(slot):
            arrived = self.arrived[: len(lora.pool)].copy_(lora.pool, non_blocking=True)
            table, weights = self._split(arrived)
            write_slot(weights, table, self.places, slot, self.largest)
        rows_of_a = self._split(lora.pool)[0][::2, 1].tolist()
        for module in self.modules.values():
            module.slot_written(slot, rows_of_a[: module.n_slices])
            del rows_of_a[: module.n_slices]

    @contextmanager
    def behind_step(self) -> Iterator[None]:
        """Inside, writes need not wait for the step launched last: it reads none of these slots."""
        self._behind_step = True
        try:
            yield
        finally:
            self._behind_step = False

    def begin_step(self, adapter_ids: Iterable[int], slots: dict[int, int]) -> None:
        """What is launched from now on finds its adapters written.

        adapter_ids   of all rows    slots   adapter id -> slot
        """
        if self.written:
            for adapter_id in slots.keys() & set(adapter_ids):
                if (event := self.written.pop(slots[adapter_id], None)) is not None:
                    torch.cuda.current_stream().wait_event(event)
        if self.on_gpu:
            self._step.record()

    @contextmanager
    def _beside_steps(self, slot: int) -> Iterator[None]:
        if not self.on_gpu:
            yield
            return
        if not self._behind_step:
            self._step.record()
        self._stream.wait_event(self._step)
        with torch.cuda.stream(self._stream):
            yield
            self.written[slot] = torch.cuda.Event()
            self.written[slot].record()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
