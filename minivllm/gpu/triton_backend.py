"""The GPU's backend: SGMV kernels. Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

import torch

from minivllm.gpu.sgmv import LoRAKernelMeta, TileList, expand, shrink, tiles_of
from minivllm.gpu.triton_slots import TritonSlots
from minivllm.gpu.triton_tables import LiveRanks, RowSlots
from minivllm.layers.linear import LinearBase
from minivllm.layers.ranks import Ranks
from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.mapping import LoRAMapping, slots_of
from minivllm.lora.slots import Slots


class TritonBackend(Backend):
    """A shrink and an expand for each linear, one launch each, whatever the mixture. vLLM: `PunicaWrapperGPU`.

    Adapters need not be neighbours in the batch: a tile list, made once a step, gathers their rows. The buffers
    that kernels read stay where they are, so a captured CUDA graph holds for every later step of its size. Rows are
    tile lists. Most adapters leave embedding and head alone: decode steps are captured with these and without.

    token_meta, prompt_meta   tile lists over the tokens, and over the sampled rows
    live_ranks, row_slots     what kernels look up beside these, in buffers that stay where they are, too
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        max_loras: int,
        meta_class: type[LoRAKernelMeta] = LoRAKernelMeta,
    ) -> None:
        super().__init__(device)
        self.token_meta = meta_class.make(max_loras, max_num_batched_tokens, device)
        self.prompt_meta = meta_class.make(max_loras, max_batches, device)
        self.live_ranks = LiveRanks(max_loras, device)
        self.row_slots = RowSlots(max_num_batched_tokens, max_batches, device)
        self._ends: list[Slots] = []

    # region lab 4.4: tile lists once a step, two launches a linear
    def begin_step(self, mapping: LoRAMapping, slot_table: list[int | None]) -> None:
        """Take in a step: both index tensors, kept on the CPU, `no_lora`, and a tile list of each for the kernels.

        Done once a step, for all layers. A step without adapters launches nothing, so it needs no tile lists. Live
        ranks come up to date here too (`sync_slots`). A mapping that `slots_of` refuses changes nothing.
        """
        tokens = torch.tensor(slots_of(mapping.index_mapping, slot_table), dtype=torch.long)
        prompts = torch.tensor(slots_of(mapping.prompt_mapping, slot_table), dtype=torch.long)
        self.token_lora_indices, self.sampler_indices = tokens, prompts
        self.no_lora = not bool((tokens >= 0).any())
        if not self.no_lora:
            self.token_meta.prepare_tensors(tokens)
            self.prompt_meta.prepare_tensors(prompts)
        self.sync_slots()

    def linear(self, x: torch.Tensor, base: LinearBase, slots: TritonSlots) -> torch.Tensor:
        """Base output plus every row's own adapter, in two launches for all slices.   x: (T, K) -> (T, N)

        A batch without adapters pays for nothing beyond `base.forward`, which answers (output, None). A short adapter
        does not pay for R: the shrink gets `slots.ranks`, the expand `slots.expand_ranks`. The buffers as the
        kernels take them are `slots.flat_a` and `flat_b`.
        """
        y = base.forward(x)[0]  # (T, N)
        if not self.no_lora:
            tiles = self.token_meta.meta_args(len(x))
            h = shrink(x, slots.flat_a, tiles, slots.ranks)  # (splits, n, T, R)
            expand(h, slots.flat_b, y, tiles, slots.expand_ranks)
        return y

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

    def two_step(self, slots: Slots, tp: Ranks, sharded: slice) -> Slots:
        """Slots whose A and B are used apart: one launch for all slices' h, and one for what is made of it."""
        # An option of minivllm.options asks for it.
        from minivllm.gpu.triton_two_step_slots import TritonTwoStepSlots

        return TritonTwoStepSlots(slots, self, tp)

    def token_rows(self, tokens: int) -> TileList:
        return self.token_meta.meta_args(tokens)

    def sample_rows(self, samples: int) -> TileList:
        return self.prompt_meta.meta_args(samples)

    def pair_rows(self, adapters: torch.Tensor, slots: Slots) -> TileList:
        """Made where the pairs are: the CPU never learns which experts were chosen."""
        return tiles_of(adapters, slots.a[0].shape[0] * slots.a[0].shape[1])

    def token_slots(self, tokens: int) -> torch.Tensor:
        return self.row_slots.tokens[:tokens]

    def sample_slots(self, samples: int) -> torch.Tensor:
        return self.row_slots.samples[:samples]

    def reaches(self, slots: Slots) -> bool:
        if slots not in self._ends:
            self._ends.append(slots)
        if self.leaves_out_ends:
            return False
        used = self.row_slots.slots_in(self.token_lora_indices)
        return any(ranks[slot] for slot in used for ranks in slots.live_ranks)

    @property
    def reaches_ends(self) -> bool:
        return any(self.reaches(slots) for slots in self._ends)

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        return self._keep(TritonSlots(slots, self.live_ranks.outdate))

    def _keep(self, slots: TritonSlots) -> TritonSlots:
        """Make room for the live ranks of one layer more."""
        self.live_ranks.keep(slots)
        return slots

    def sync_slots(self) -> None:
        self.live_ranks.sync()
        if not self.no_lora:
            self.row_slots.copy(self.token_lora_indices, self.sampler_indices)

    @property
    def tables(self) -> list[torch.Tensor]:
        metas = (self.token_meta, self.prompt_meta)
        tile_lists = [table for meta in metas for table in (meta.rows, meta.tiles)]
        return [*tile_lists, self.live_ranks.ranks, self.row_slots.tokens, self.row_slots.samples]
