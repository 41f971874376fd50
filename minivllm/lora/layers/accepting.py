"""A wrapped layer judges and packs what adapters have for it. Stands for checks that vllm/lora/ (v0.22.1) lacks."""

from collections.abc import Sequence
from itertools import cycle

from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.seams import beside_checks

LayerWeights = LoRALayerWeights | PackedLoRALayerWeights
Parts = list[LoRALayerWeights | None]  # of a layer, one entry a slice


class AcceptsWeights:
    """The half of a wrapped layer that says which weights fit it (`judge`), and packs them.

    slice_sizes  K_i and N_i of each slice, of which there are n
    targets      what adapters may call a slice -> its number; other names stand for the whole of a fused layer
    max_rank     R
    """

    slice_sizes: Sequence[tuple[int, int]]
    targets: dict[str, int]
    max_rank: int

    @property
    def n_slices(self) -> int:
        return len(self.slice_sizes)

    # region lab 2.6: refuse an adapter that does not fit
    def judge(self, found: dict[str, LoRALayerWeights]) -> Parts:
        """What an adapter has for each slice (`by_slice`), None where there is nothing; `found` stays as it is.

        found   name of a slice (`targets`) or of the whole of a fused layer -> weights, perhaps shapes only (meta)

        ValueError as in `refuse_misfit`, which looks at each, given K and N of its slice.
        """
        parts = self.by_slice(found)
        for weights, size in zip(parts, cycle(self.slice_sizes)):  # experts have n parts each
            if weights is not None:
                self.refuse_misfit(weights, *size)
        return parts

    def refuse_misfit(self, weights: LoRALayerWeights, width: int, height: int) -> None:
        """ValueError, naming the module, unless the rank is `max_rank` at most, A is (r, width) and B (height, r).

        For a rank the message has `max_lora_rank`, and the option `--max-lora-rank r` that would admit it. For A and
        B it has their shapes and those expected, as tuples. What is beside A and B its option judges first
        (`beside_checks`).
        """
        for beside in weights.beside:
            beside_checks[beside](self, weights)
        name, rank = weights.module_name, weights.lora_a.shape[0]
        if rank > self.max_rank:
            raise ValueError(
                f"{name} has rank {rank}, which is greater than max_lora_rank {self.max_rank}; "
                f"pass --max-lora-rank {rank}"
            )
        found = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
        expected = (rank, width), (height, rank)
        if found != expected:
            raise ValueError(
                f"{name} has lora_A {found[0]} and lora_B {found[1]}, expected {expected[0]} and {expected[1]}"
            )

    # endregion

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> Parts:
        """One entry a slice. An adapter for a whole fused layer is split: every slice gets its A, and rows of its B.

        ValueError for weights of the whole beside those of a slice, or for a B of another height.
        """
        whole = next((name for name in found if name not in self.targets), None)
        if whole is not None:
            if also := [name for name in found if name in self.targets]:
                raise ValueError(
                    f"the adapter has weights for {whole} and for {', '.join(also)}, a part of it; give either"
                )
            heights = [height for _, height in self.slice_sizes]
            # The first n targets are those of the layer's first name, in the order of slices; there may be none.
            names = list(self.targets)[: self.n_slices] or [whole] * self.n_slices
            return found[whole].split(names, heights)
        parts: Parts = [None] * len(self.slice_sizes)
        for name, weights in found.items():
            parts[self.targets[name]] = weights
        return parts

    def pack(self, parts: Parts) -> LayerWeights:
        """What `judge` gave in the form in which slots take it: all slices in one, the scaling folded into B."""
        return PackedLoRALayerWeights.pack(parts) if len(parts) > 1 else parts[0].optimize()
