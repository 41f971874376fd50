"""What kernels look up: live ranks, the slot of each row. Beside vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from collections.abc import Iterable

import numpy as np
import torch

from minivllm.gpu.sgmv import LoRAKernelMeta
from minivllm.gpu.triton_slots import TritonSlots
from minivllm.layers.linear import LinearBase
from minivllm.layers.to_device import to_device
from minivllm.lora.backend import Backend
from minivllm.lora.slots import Slots


class TritonTables(Backend):
    """The tables of a backend of kernels. They stay where they are, so that a captured CUDA graph may read them.

    token_meta, prompt_meta   tile lists over the tokens, and over the sampled rows
    ranks                     (sum of n over layers, S) int32: live rank of each slice and slot

    Most adapters leave embedding and head alone. Decode steps are captured with these and without.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, max_loras: int
    ) -> None:
        super().__init__(device)
        self.token_meta = LoRAKernelMeta.make(max_loras, max_num_batched_tokens, device)
        self.prompt_meta = LoRAKernelMeta.make(max_loras, max_batches, device)
        self.ranks = torch.zeros(0, max_loras, dtype=torch.int32, device=device)
        self._ranks = np.zeros((0, max_loras), dtype=np.int32)  # as they are on the device, or will be
        self._stale_slots: set[int] = set()
        self._placed: list[TritonSlots] = []
        self._ends: list[Slots] = []
        self._token_slots = torch.full((max_num_batched_tokens,), -1, dtype=torch.long, device=device)
        self._sampler_slots = torch.full((max_batches,), -1, dtype=torch.long, device=device)
        self._copied = self.token_lora_indices  # what the two hold on the GPU
        self._slots_found_in, self._step_slots = self.token_lora_indices, set[int]()

    def token_slots(self, tokens: int) -> torch.Tensor:
        return self._token_slots[:tokens]

    def sample_slots(self, samples: int) -> torch.Tensor:
        return self._sampler_slots[:samples]

    def reaches(self, slots: Slots) -> bool:
        if slots not in self._ends:
            self._ends.append(slots)
        if self.leaves_out_ends:
            return False
        return any(ranks[slot] for slot in self._slots_of_step() for ranks in slots.live_ranks)

    @property
    def reaches_ends(self) -> bool:
        return any(self.reaches(slots) for slots in self._ends)

    def _slots_of_step(self) -> set[int]:
        """Slots that the step uses; found once a step, and only if somebody asks."""
        if self._slots_found_in is not self.token_lora_indices:
            self._step_slots = set(self.token_lora_indices.tolist()) - {-1}
            self._slots_found_in = self.token_lora_indices
        return self._step_slots

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        return self._keep(TritonSlots(slots, self.outdate_ranks))

    def _keep(self, slots: TritonSlots) -> TritonSlots:
        """Make room for the live ranks of one layer more."""
        self._placed.append(slots)
        count = sum(len(placed.a) for placed in self._placed)
        self.ranks = self.ranks.new_zeros(count, self.ranks.shape[1])
        first = 0
        for placed in self._placed:
            placed.bind_ranks(self.ranks[first : (first := first + len(placed.a))])
        self._ranks = np.zeros(self.ranks.shape, dtype=np.int32)
        self._stale_slots.update(range(self.ranks.shape[1]))
        return slots

    def outdate_ranks(self, slots: Iterable[int]) -> None:
        """The live ranks of these slots are no longer those on the device."""
        self._stale_slots.update(slots)

    def sync_slots(self) -> None:
        if self._stale_slots:
            for slot in self._stale_slots:
                live = [ranks[slot] for slots in self._placed for ranks in slots.live_ranks]
                self._ranks[:, slot] = live
            self.ranks.copy_(to_device(self._ranks.copy(), self.ranks.device), non_blocking=True)
            self._stale_slots.clear()
        if self._copied is not self.token_lora_indices and not self.no_lora:
            tokens, samples = self.token_lora_indices, self.sampler_indices
            self._token_slots[: len(tokens)].copy_(tokens, non_blocking=True)
            self._sampler_slots[: len(samples)].copy_(samples, non_blocking=True)
            self._copied = tokens

    @property
    def tables(self) -> list[torch.Tensor]:
        metas = (self.token_meta, self.prompt_meta)
        tile_lists = [table for meta in metas for table in (meta.rows, meta.tiles)]
        return [*tile_lists, self.ranks, self._token_slots, self._sampler_slots]
