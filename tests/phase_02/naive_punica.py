"""Stand-ins for phase 03: backends of a few lines that the wrapped layers are tested with.

All of them compute token by token in float64. They differ in where they keep A and B, which must not matter.
"""

import torch
import torch.nn.functional as F
from scattered_slots import ScatteredSlots


class NaivePunica:
    """What a backend owes a layer: the base output plus each row's own adapter.

    token_slots: the slot of each row, -1 for base rows; a test sets it before a forward pass
    sample_slots: likewise of each row that is sampled; None where all are
    """

    def __init__(self, token_slots=(), sample_slots=None):
        self.token_slots = token_slots
        self.sample_slots = sample_slots

    def adopt(self, layer):
        """Leaves A and B where the layer made them."""

    def slot_changed(self, layer, slot):
        """Has worked nothing out that could be stale."""

    @property
    def no_lora(self):
        return all(slot < 0 for slot in self.token_slots)

    def reaches(self, layer):
        return True

    def slots_of_tokens(self, tokens):
        return torch.tensor(self.token_slots[:tokens])

    def slots_of_samples(self, rows):
        slots = self.token_slots if self.sample_slots is None else self.sample_slots
        return torch.tensor(slots[:rows])

    def apply_linear(self, layer, x):
        y = layer.base_output(x)
        for token, slot in enumerate(self.token_slots):
            if slot >= 0:
                y[token] += self.added(layer, slot, x[token].double()).to(y.dtype)
        return y

    def add_lora_embedding(self, y, x, lora_b_stacked, add_inputs=True):
        for token, slot in enumerate(self.token_slots):
            if slot >= 0:
                y[token] += (lora_b_stacked[slot, 0].double() @ x[token].double()).to(y.dtype)

    def apply_logits(self, layer, y, x):
        for row, slot in enumerate(self.slots_of_samples(len(y)).tolist()):
            if slot >= 0:
                a, b = layer.lora_a_stacked[slot, 0].double(), layer.lora_b_stacked[slot, 0].double()
                y[row] += (b @ (a @ x[row].double())).to(y.dtype)

    def added(self, layer, slot, row):
        slices = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        return torch.cat([b[slot, 0].double() @ (a[slot, 0].double() @ row) for a, b in slices])


class ScatteredPunica(NaivePunica):
    """A and B of all layers in one tensor, no two elements of a slot together."""

    def __init__(self, dtype):
        super().__init__()
        self.adopt = ScatteredSlots(dtype).adopt


class TailRowsPunica(NaivePunica):
    """A of every slot as the last rows of a copy of the base weight: one product computes base and shrink."""

    def __init__(self):
        super().__init__()
        self.extended = {}

    def adopt(self, layer):
        if not layer.is_linear:
            return
        slots, _, rank, width = layer.lora_a_stacked[0].shape
        tail = torch.zeros(slots * rank * layer.n_slices, width, dtype=layer.weight.dtype)
        extended = torch.cat([layer.weight, tail])
        rows = extended[layer.output_size :].view(slots, rank, layer.n_slices, width)
        layer.re_home(tuple(a.unsqueeze(1) for a in rows.unbind(2)), layer.lora_b_stacked)
        self.extended[layer] = extended

    def apply_linear(self, layer, x):
        slots, _, rank, _ = layer.lora_a_stacked[0].shape
        product = F.linear(x, self.extended[layer])
        y, shrunk = product.tensor_split([layer.output_size], dim=1)
        y = y.clone() if layer.bias is None else y + layer.bias
        shrunk = shrunk.reshape(-1, slots, rank, layer.n_slices)
        for token, slot in enumerate(self.token_slots):
            if slot >= 0:
                parts = [b[slot, 0] @ shrunk[token, slot, :, i] for i, b in enumerate(layer.lora_b_stacked)]
                y[token] += torch.cat(parts)
        return y


def backends(dtype):
    """One of each, by name."""
    return {"in place": NaivePunica(), "scattered": ScatteredPunica(dtype), "tail rows": TailRowsPunica()}
