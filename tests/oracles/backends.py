"""Backends that the wrapped layers are tested with. They differ in where they keep A and B, which must not matter."""

import torch
import torch.nn.functional as F

from minivllm.lora.slots import Slots
from tests.oracles.toy_backend import ToyBackend
from tests.tools.memory import ScatteredSlots


class NaivePunica(ToyBackend):
    """What a backend owes a layer: each row's own adapter.

    token_slots: the slot of each row, -1 for base rows; a test sets it before a forward pass
    sampled: likewise of each row that is sampled; None where all are
    """

    def __init__(self, token_slots=(), sampled=None):
        super().__init__("cpu")
        self.sampled, self.token_slot_list = sampled, token_slots

    @property
    def no_lora(self):
        return all(slot < 0 for slot in self.token_slot_list)

    @no_lora.setter
    def no_lora(self, value):
        """A test says which rows there are."""

    def token_slots(self, tokens):
        return torch.tensor(self.token_slot_list[:tokens])

    def sample_slots(self, samples):
        slots = self.token_slot_list if self.sampled is None else self.sampled
        return torch.tensor(slots[:samples])

    token_rows, sample_rows = token_slots, sample_slots

    def reaches(self, slots):
        return True


class ScatteredPunica(NaivePunica):
    """A and B of all layers in one tensor, no two elements of a slot together."""

    def __init__(self, dtype):
        super().__init__()
        self.place = ScatteredSlots(dtype).place


class TailRows(Slots):
    """A of every slot as the last rows of a copy of the base weight."""

    def __init__(self, slots, base):
        count, _, rank, width = slots.a[0].shape
        tail = torch.zeros(count * rank * len(slots.a), width, dtype=base.weight.dtype)
        self.extended = torch.cat([base.weight, tail])
        rows = self.extended[base.output_size :].view(count, rank, len(slots.a), width)
        super().__init__([a.unsqueeze(1) for a in rows.unbind(2)], slots.b)
        self.take_over(slots)


class TailRowsPunica(NaivePunica):
    """One product computes base and shrink."""

    def place(self, slots, base):
        return slots if base is None else TailRows(slots, base)

    def linear(self, x, base, slots):
        count, _, rank, _ = slots.a[0].shape
        product = F.linear(x, slots.extended)
        y, shrunk = product.tensor_split([base.output_size], dim=1)
        y = y.clone() if base.bias is None else y + base.bias
        shrunk = shrunk.reshape(-1, count, rank, len(slots.a))
        for token, slot in enumerate(self.token_slot_list):
            if slot >= 0:
                parts = [b[slot, 0] @ shrunk[token, slot, :, i] for i, b in enumerate(slots.b)]
                y[token] += torch.cat(parts)
        return y


def backends(dtype):
    """One of each, by name."""
    return {"in place": NaivePunica(), "scattered": ScatteredPunica(dtype), "tail rows": TailRowsPunica()}
