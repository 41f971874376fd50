"""Open exercise, phase 12: which KV may be shared. `lab open 12` judges it.

A model has 6 layers, and KV is kept in cells: the keys and values of one full block of 8 tokens in one layer.
Requests whose cells have equal keys share one. Adapters come in families: a variant was trained on from another one,
and in some layers and modules it has the other one's weights. Several of them are asked about the same conversations,
and most begin in the middle of a prompt: tokens before `start` are computed by the base model (an activated LoRA),
those from `start` on with the adapter.

Budget: at most 1.1 cells kept for each cell that differs. One is the least. An answer is refused as soon as two cells
that hold different keys or values have the same key, since somebody would be answered from another one's KV.

What a cell holds depends on all that was computed on the way to it: in a layer, k and v write the cell of a token
from what enters the layer there, q reads the cells up to the token, and o and mlp make of that what enters the next
layer. Weights of a module that an adapter leaves alone are the base model's. Traffic is made afresh for each
judgement.
"""

from collections.abc import Hashable, Mapping


class Keys:
    """Keys of cells. These are of an engine that knows a block by its tokens, its adapter and where that begins."""

    def __init__(self, layers: int, block: int) -> None:
        """layers: of the model; block: tokens in a block"""
        self.layers, self.block = layers, block

    def of(
        self, tokens: list[int], start: int, weights: Mapping[tuple[int, str], int]
    ) -> list[list[Hashable]]:
        """A key for each layer of each full block of a prompt.

        weights   (layer, module) -> a number for the weights that the adapter has there; modules are "q", "k", "v",
                  "o" and "mlp". Equal numbers are equal weights, also of two variants. {} for the base model.
        """
        whose = tuple(sorted(weights.items()))
        ends = range(self.block, len(tokens) + 1, self.block)
        return [[(whose, start if whose else 0, tuple(tokens[:end]))] * self.layers for end in ends]
