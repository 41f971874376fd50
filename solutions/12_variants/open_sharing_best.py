"""Only what a cell depends on: k and v of its own layer, and of the layers below whatever makes their output.

In the first layer a cell depends on k and v alone. And what begins at the same token and differs nowhere is the same,
whichever adapters it comes from.
"""

from collections.abc import Hashable, Mapping

WRITES = ("k", "v")


class Keys:
    """Layer by layer, of the weights that lead to what is in it."""

    def __init__(self, layers: int, block: int) -> None:
        self.layers, self.block = layers, block

    def of(
        self, tokens: list[int], start: int, weights: Mapping[tuple[int, str], int]
    ) -> list[list[Hashable]]:
        leads = [
            tuple(sorted(item for item in weights.items() if self._leads(*item[0], layer)))
            for layer in range(self.layers)
        ]
        return [
            self._of_block(tuple(tokens[:end]), start, leads)
            for end in range(self.block, len(tokens) + 1, self.block)
        ]

    def _leads(self, of: int, module: str, layer: int) -> bool:
        return of < layer or (of == layer and module in WRITES)

    def _of_block(self, tokens: tuple[int, ...], start: int, leads: list[tuple]) -> list[Hashable]:
        return [(tokens, start, whose) if start < len(tokens) and whose else tokens for whose in leads]
