"""Adapters into slots on a GPU: one transfer and one launch each, beside the steps that do not need them.

vLLM 0.22.1 copies tensor by tensor, on the stream that computes (`set_lora`, vllm/lora/layers/base_linear.py).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from minivllm.gpu.page_locked import PageLockedMemory, lock_for_gpu
from minivllm.lora.layers.base import BaseLayerWithLoRA, LayerWeights
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.wrapping import WrappedModules

ALIGNMENT = 16  # bytes; a piece that begins at a multiple is read at full speed whatever its dtype


class SlotWriter:
    """Writes slots from page-locked memory, on a stream of its own.

    An adapter is one piece of memory: a table of where its A's and B's are, then these. It arrives in a buffer on
    the GPU, and one kernel brings everything from there to its place.

    Two orders are kept. A slot is written when the steps that may read it are through: those launched before the
    write or, inside `behind_step`, before the last `begin_step`. And a step that uses a slot waits until it is
    written; others do not.

    places     (P, 6) int64, see `write_slot`: A and B of every slice, and expert, of every module, and its extras
    memory     page-locked, on a GPU
    pools      adapter -> its part of that, as long as anybody has the adapter
    written    slot -> event of its last write, until a step has waited for it
    """

    def __init__(self, wrapped: WrappedModules, device: torch.device | str) -> None:
        self.modules = wrapped.modules
        buffers = [buffer for module in self.modules.values() for buffer in _buffers(module)]
        self.dtype = buffers[0].dtype
        self.places = torch.tensor([_place(buffer, device) for buffer in buffers], device=device)
        here = [buffer[0].numel() for buffer in buffers if _is_here(buffer, device)]
        self.largest = max(here, default=0)
        self.table_bytes = _aligned(len(buffers) * 3 * torch.int64.itemsize)
        largest_adapter = sum(_aligned(buffer[0].nbytes) for buffer in buffers)
        self.arrived = torch.empty(self.table_bytes + largest_adapter, dtype=torch.uint8, device=device)
        self.pools: WeakKeyDictionary[LoRAModel, torch.Tensor] = WeakKeyDictionary()
        self.written: dict[int, torch.cuda.Event] = {}
        self._behind_step = False
        self.on_gpu = self.arrived.is_cuda
        if self.on_gpu:
            self._stream, self._step = torch.cuda.Stream(device), torch.cuda.Event()
            self.memory = PageLockedMemory(lock_for_gpu, self._stream.synchronize)

    # ---- memory ---------------------------------------------------------------------------------------------

    def stage(self, lora: LoRAModel) -> None:
        """Move an accepted adapter into one piece of page-locked memory; its tensors become views of it.

        Once is enough. Any thread may do it that nobody else reads the adapter in.
        """
        if lora in self.pools:
            return
        tensors = [tensor for weights in lora.loras.values() for tensor in weights.tensors]
        nbytes = sum(_aligned(tensor.numel() * self.dtype.itemsize) for tensor in tensors)
        pool = self.take(nbytes)
        room = self.weights_in(pool)
        used, given, places = 0, [], []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal used
            place = room[used : used + tensor.numel()].view(tensor.shape)
            used += _aligned(place.nbytes) // place.itemsize
            given.append(tensor)
            places.append(place)
            return place

        for weights in lora.loras.values():
            weights.replace_tensors(move)
        # One call gives up the interpreter's lock once. Beside a busy thread it takes long to have it again.
        if places:
            torch._foreach_copy_(places, given)
        self.keep(lora, pool)

    def take(self, nbytes: int) -> torch.Tensor:
        """A pool for an adapter whose weights take so many bytes. Any thread may call it."""
        total = self.table_bytes + nbytes
        return self.memory.take(total) if self.on_gpu else torch.empty(total, dtype=torch.uint8)

    def weights_in(self, pool: torch.Tensor) -> torch.Tensor:
        """Where the weights go: (elements,). Each of them begins at a multiple of `ALIGNMENT` bytes."""
        return self._split(pool)[1]

    def keep(self, lora: LoRAModel, pool: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """Note that the weights of an accepted adapter are in a pool. Gives a copy of their table.

        table   of another adapter whose weights have the same places; None = make it
        """
        table = self._table_of(lora, self.weights_in(pool)) if table is None else table
        self._split(pool)[0].copy_(table)
        self.pools[lora] = pool
        return table

    def _table_of(self, lora: LoRAModel, room: torch.Tensor) -> torch.Tensor:
        """Where each piece is: (P, 3) int64, its first element, rows and columns."""
        rows = []
        for name, module in self.modules.items():
            for piece in _pieces(module, lora.get_lora(name)):
                is_there = piece is not None and piece.numel()  # a module with added tokens may have rank 0
                start = (piece.data_ptr() - room.data_ptr()) // room.itemsize if is_there else 0
                rows.append([start, *piece.shape] if is_there else [0, 0, 0])
        return torch.tensor(rows)

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An adapter's memory, here or on the GPU, as its table (P, 3) and its weights (elements,)."""
        table = memory[: len(self.places) * 3 * torch.int64.itemsize].view(torch.int64)
        return table.view(-1, 3), memory[self.table_bytes :].view(self.dtype)

    # ---- slots ----------------------------------------------------------------------------------------------

    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy an adapter that was taken into one slot of every layer, zeros past its ranks."""
        with self._beside_steps(slot):
            pool = self.pools[lora]
            arrived = self.arrived[: len(pool)].copy_(pool, non_blocking=True)
            table, weights = self._split(arrived)
            self._scatter(weights, table, slot)
        for name, module in self.modules.items():
            _written(module, slot, lora.get_lora(name))

    def _scatter(self, weights: torch.Tensor, table: torch.Tensor, slot: int) -> None:
        """Bring an adapter that has arrived to its places."""
        from minivllm.gpu.sgmv.write_slot_op import write_slot  # Triton is not everywhere

        if self.largest:
            write_slot(weights, table, self.places, slot, self.largest)

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
                self.wait_for(slots[adapter_id])
        if self.on_gpu:
            self._step.record()

    def wait_for(self, slot: int) -> None:
        """What is launched from now on runs after the slot's last write: others may get its memory."""
        if (event := self.written.pop(slot, None)) is not None:
            torch.cuda.current_stream().wait_event(event)

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


def _written(module: BaseLayerWithLoRA, slot: int, weights: LayerWeights | None) -> None:
    """Note the live ranks of a slot that the kernel has filled."""
    slots = module.slots
    parts = [None] * module.n_slices if weights is None else weights.parts
    for live, part in zip(slots.live_ranks, parts):
        live[slot] = 0 if part is None else part.lora_a.shape[-2]
    for live, part in zip(
        getattr(slots, "live_ranks_of_b", ()), parts
    ):  # of two steps: a process has more of B
        live[slot] = 0 if part is None else part.lora_b.shape[-1]
    slots.changed(slot)


def _buffers(module: BaseLayerWithLoRA) -> Iterator[torch.Tensor]:
    """Where an adapter's matrices go, in the order of `_pieces`: (S, rows, columns) each"""
    for a, b in zip(module.slots.a, module.slots.b):
        for expert in range(a.shape[1]):
            yield a[:, expert]
            yield b[:, expert]
    for tables in module.slots.beside.values():
        yield from tables


def _is_here(buffer: torch.Tensor, device: torch.device | str) -> bool:
    """Whether it is memory, and no mere shape; all are shapes where nothing is to be computed."""
    return buffer.device.type == torch.device(device).type


def _place(buffer: torch.Tensor, device: torch.device | str) -> list[int]:
    """A row of `places`; one without rows for a buffer that is somewhere else."""
    if not _is_here(buffer, device):
        return [0, 0, 0, 0, 0, 1]
    return [buffer.data_ptr(), *buffer.stride(), *buffer.shape[1:]]


def _pieces(module: BaseLayerWithLoRA, weights: LayerWeights | None) -> Iterator[torch.Tensor | None]:
    """An adapter's matrices for a module, None for each that it lacks: (rows, columns) each"""
    parts = [None] * module.n_slices if weights is None else weights.parts
    for buffer, part in zip(module.slots.a, parts):
        for expert in range(buffer.shape[1]):
            for tensor in (None, None) if part is None else (part.lora_a, part.lora_b):
                yield tensor[expert] if tensor is not None and tensor.ndim == 3 else tensor
    for name in module.slots.beside:
        yield from (None if part is None else part.beside.get(name) for part in parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
