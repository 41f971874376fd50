"""A backend may put A and B wherever it likes: a layer must not notice. Of a whole model: test_contract.

Three backends compute the same thing from slots in three places: where the layer made them, scattered over
one tensor for all layers, and as the last rows of a copy of the base weight.
"""

import pytest
import torch

from tests.oracles.backends import NaivePunica, backends
from tests.worlds.linears import DTYPE, ToyModel, toy_adapter, wrap

BACKENDS = list(backends(DTYPE))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return backends(DTYPE)[request.param]


def outputs_of(layer, x, token_slots):
    layer.punica_wrapper.token_slot_list = token_slots
    return layer(x)[0]


def assert_same_outputs(ours, reference, seed):
    """Both models' layers on random rows that mix all slots and the base."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in ours.modules.items():
        x = torch.randn(7, layer.input_size, dtype=DTYPE, generator=generator)
        slots = torch.randint(-1, 3, (7,), generator=generator).tolist()
        expected = outputs_of(reference.modules[name], x, slots)
        torch.testing.assert_close(outputs_of(layer, x, slots), expected, rtol=1e-12, atol=1e-12)


def test_outputs_do_not_depend_on_where_the_slots_are(backend):
    ours, reference = wrap(ToyModel(), backend), wrap(ToyModel(), NaivePunica())
    generator = torch.Generator().manual_seed(0)

    for seed in range(20):
        slot = int(torch.randint(3, (), generator=generator))
        rank = int(torch.randint(1, 9, (), generator=generator))
        modules = None if seed % 3 else ["attn.v_proj", "mlp.gate_proj", "router"]
        for wrapped in (ours, reference):
            lora = toy_adapter(seed, modules, rank)
            wrapped.accept(lora)
            wrapped.write(lora, slot)

        assert_same_outputs(ours, reference, seed)


@pytest.mark.parametrize("backend", ["scattered", "tail rows"])
def test_a_backend_that_takes_over_later_takes_what_the_slots_hold(backend):
    ours, reference = wrap(ToyModel(), NaivePunica()), wrap(ToyModel(), NaivePunica())
    for wrapped in (ours, reference):
        for slot in range(3):
            lora = toy_adapter(slot, rank=2 + slot)
            wrapped.accept(lora)
            wrapped.write(lora, slot)

    successor = backends(DTYPE)[backend]
    for layer in ours.modules.values():
        layer.set_mapping(successor)

    assert_same_outputs(ours, reference, seed=1)
