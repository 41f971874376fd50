"""A cell depends on its own layer and those below, so what a variant has in layers above is left out of its key.

A block that ends before the adapter begins is the base model's in every layer.
"""

from collections.abc import Hashable, Mapping


class Keys:
    """Layer by layer, of the weights up to that layer."""

    def __init__(self, layers: int, block: int) -> None:
        self.layers, self.block = layers, block

    def of(
        self, tokens: list[int], start: int, weights: Mapping[tuple[int, str], int]
    ) -> list[list[Hashable]]:
        up_to = [
            tuple(sorted(item for item in weights.items() if item[0][0] <= layer))
            for layer in range(self.layers)
        ]
        return [
            self._of_block(tuple(tokens[:end]), start, up_to)
            for end in range(self.block, len(tokens) + 1, self.block)
        ]

    def _of_block(self, tokens: tuple[int, ...], start: int, up_to: list[tuple]) -> list[Hashable]:
        return [(tokens, start, whose) if start < len(tokens) and whose else tokens for whose in up_to]
