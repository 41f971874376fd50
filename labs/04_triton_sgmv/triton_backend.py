"""The GPU's backend: SGMV kernels. Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from minivllm.labs import Todo
import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.gpu.triton_slots import TritonSlots
from minivllm.lora.mapping import LoRAMapping, slots_of
from minivllm.lora.ops.triton_ops import LoRAKernelMeta, TileList, expand, shrink, tiles_of
from minivllm.lora.slots import Slots


class TritonBackend(Backend):
    """A shrink and an expand for each linear, one launch each, whatever the mixture. vLLM: `PunicaWrapperGPU`.

    Adapters need not be neighbours in the batch: a tile list, made once a step, gathers their rows. The buffers
    that kernels read stay where they are, so a captured CUDA graph holds for every later step of its size. Rows are
    tile lists.

    token_meta, prompt_meta   tile lists over the tokens, and over the sampled rows
    ranks                     (sum of n over layers, S) int32: live rank of each slice and slot
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, max_loras: int
    ) -> None:
        super().__init__(device)
        self.token_meta = LoRAKernelMeta.make(max_loras, max_num_batched_tokens, device)
        self.prompt_meta = LoRAKernelMeta.make(max_loras, max_batches, device)
        self.ranks = torch.zeros(0, max_loras, dtype=torch.int32, device=device)
        self.ranks_are_stale = False
        self._placed: list[TritonSlots] = []
        self._token_slots = torch.full((max_num_batched_tokens,), -1, dtype=torch.long, device=device)
        self._sampler_slots = torch.full((max_batches,), -1, dtype=torch.long, device=device)
        self._copied = self.token_lora_indices  # what the two hold on the GPU
        self._slots_found_in, self._step_slots = self.token_lora_indices, set[int]()

    # region lab 4.4: tile lists once a step, two launches a linear
    def begin_step(self, mapping: LoRAMapping, slot_table: list[int | None]) -> None:
        """Take in a step: both index tensors, kept on the CPU, `no_lora`, and a tile list of each for the kernels.

        Done once a step, for all layers. A step without adapters launches nothing, so it needs no tile lists. Live
        ranks come up to date here too (`sync_slots`). A mapping that `slots_of` refuses changes nothing.
        """
        raise Todo("lab 4.4: tile lists once a step, two launches a linear")

    def linear(self, x: torch.Tensor, base: LinearBase, slots: TritonSlots) -> torch.Tensor:
        """Base output plus every row's own adapter, in two launches for all slices.   x: (T, K) -> (T, N)

        A batch without adapters pays for nothing beyond `base.forward`, which answers (output, None). A short adapter
        does not pay for R: the shrink is told `slots.ranks`, the expand `slots.expand_ranks`. The buffers as the
        kernels take them are `slots.flat_a` and `flat_b`.
        """
        raise Todo("lab 4.4: tile lists once a step, two launches a linear")

    # endregion

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: TritonSlots,
        rows: TileList,
        slices: slice = ALL_SLICES,
    ) -> None:
        experts = slots.a[0].shape[1]
        ranks = slots.ranks[slices]
        if experts > 1:
            ranks = ranks.repeat_interleave(experts, dim=1)  # (n, S * E)
        h = shrink(x, slots.flat_a[slices], rows, ranks)  # (splits, n, rows, R)
        expand(h, slots.flat_b[slices], y, rows, ranks)

    def expand(self, y: torch.Tensor, h: torch.Tensor, slots: TritonSlots, rows: TileList) -> None:
        expand(h[None, None], slots.flat_b, y, rows)

    def token_rows(self, tokens: int) -> TileList:
        return self.token_meta.meta_args(tokens)

    def sample_rows(self, samples: int) -> TileList:
        return self.prompt_meta.meta_args(samples)

    def pair_rows(self, adapters: torch.Tensor, slots: Slots) -> TileList:
        """Made where the pairs are: the CPU never learns which experts were chosen."""
        return tiles_of(adapters, slots.a[0].shape[0] * slots.a[0].shape[1])

    def token_slots(self, tokens: int) -> torch.Tensor:
        return self._token_slots[:tokens]

    def sample_slots(self, samples: int) -> torch.Tensor:
        return self._sampler_slots[:samples]

    def reaches(self, slots: Slots, exactly: bool = False) -> bool:
        return not exactly or any(ranks[slot] for slot in self._slots_of_step() for ranks in slots.live_ranks)

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
        self.ranks_are_stale = True
        return slots

    def outdate_ranks(self) -> None:
        self.ranks_are_stale = True

    def sync_slots(self) -> None:
        if self.ranks_are_stale:
            ranks = [slice_ranks for slots in self._placed for slice_ranks in slots.live_ranks]
            self.ranks.copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)
            self.ranks_are_stale = False
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
