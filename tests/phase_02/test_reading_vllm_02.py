"""What phases/02 asks about vLLM's wrapping of a model, answered by scenarios here."""

import torch

from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots
from tests.oracles.backends import NaivePunica
from tests.worlds.linears import SharingModel, random_pair, wrap


def test_a_layer_of_two_names_is_written_once():
    model = SharingModel()

    wrapped = wrap(model, NaivePunica())

    assert model.layers[1].runner.gate is model.layers[1].router
    layers = list(wrapped.modules.values())
    assert len(layers) == len(set(map(id, layers)))
    assert [name for name in wrapped.modules if name.endswith(("router", "gate"))] == [
        "layers.0.router",
        "layers.1.router",
    ]


def test_an_empty_slot_is_written_no_further_than_the_adapters_rank():
    slots = Slots.empty(2, 8, [(5, 4)], torch.float64, "cpu")
    slots.a[0][1, :, 3:], slots.b[0][1, :, :, 3:] = 7, 7
    a, b = random_pair(5, 3, 4, seed=1)

    slots.write(1, [LoRALayerWeights("q_proj", 3, 3.0, a, b)])

    assert torch.equal(slots.a[0][1, 0, :3], a)
    assert torch.equal(slots.b[0][1, 0, :, :3], b)
    assert (slots.a[0][1, :, 3:] == 7).all()
    assert (slots.b[0][1, :, :, 3:] == 7).all()
