"""Whose the rows of a batch are, in words for failures."""

from collections.abc import Iterable


def labels_of(token_slots: Iterable[int]) -> list[str]:
    """token_slots: (T,) list or tensor, -1 = base"""
    return ["a base row" if slot < 0 else f"slot {int(slot)}" for slot in token_slots]
