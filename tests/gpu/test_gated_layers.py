"""Gate and up leave what adapters add to the activation behind them, but to a hook they give whole outputs."""

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.gpu.fused import FusedSiluAndMul, blocks
from minivllm.gpu.fused.blocks import activate, linear_deferred
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.linear import MergedColumnParallelLinear
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.lora.wrapping import from_layer
from tests.tools.device import DEVICE

WIDTH, INNER, RANK, SLOTS = 48, 40, 8, 3


class GateUp:
    """Gate and up with adapters of unlike ranks in slots 0 and 2, and the activation behind them."""

    def __init__(self):
        config = LoRAConfig(RANK, SLOTS, lora_dtype=torch.float32, punica_backend="paged")
        self.punica = make_backend(64, 64, DEVICE, config, LORA_EXTENSIONS)
        self.base = MergedColumnParallelLinear(WIDTH, [INNER] * 2, False, torch.float32, DEVICE)
        pick = torch.Generator().manual_seed(0)
        self.base.weight.data.copy_(torch.randn(2 * INNER, WIDTH, generator=pick))
        self.layer = from_layer(self.base, SLOTS, config, ["gate", "up"])
        self.layer.set_mapping(self.punica)
        self.activation = FusedSiluAndMul() if DEVICE == "cuda" else SiluAndMul()
        self.weights = {}
        for slot, ranks in {0: (RANK, 3), 2: (0, 5)}.items():
            a = [torch.randn(r, WIDTH, generator=pick) if r else None for r in ranks]
            b = [torch.randn(INNER, r, generator=pick) if r else None for r in ranks]
            self.layer.set_lora(slot, a, b)
            self.weights[slot] = a, b

    def step(self, slots):
        ids = [slot + 1 for slot in slots]
        self.punica.begin_step(LoRAMapping(ids, ids, is_prefill=True), list(range(1, SLOTS + 1)))

    def run(self, x):
        with torch.inference_mode():
            return activate(self.activation, *linear_deferred(self.layer, x.to(DEVICE))).cpu()

    def expected(self, x, slots, more=0.0):
        """`more`: what else is added to gate and up"""
        y = x.double() @ self.base.weight.double().cpu().T + more
        for row, slot in enumerate(slots):
            for i, (a, b) in enumerate(zip(*self.weights.get(slot, ([], [])))):
                if a is not None:
                    y[row, i * INNER : (i + 1) * INNER] += b.double() @ (a.double() @ x[row].double())
        gate, up = y.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


@pytest.fixture
def linear():
    return GateUp()


def rows(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)) / 8


def assert_close(found, expected):
    assert (found.double() - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("slots", [[0], [2, -1, 0, 0, 2, -1, 1], [-1, 0] * 9], ids=["one", "mixed", "half"])
def test_the_activation_gives_every_row_its_adapters_share(linear, slots):
    x = rows(len(slots))

    linear.step(slots)

    assert_close(linear.run(x), linear.expected(x, slots))


def test_what_a_hook_adds_to_the_output_is_there_too(linear):
    x, slots = rows(6), [0, 2, -1, 0, 1, 2]
    linear.layer.register_forward_hook(lambda layer, inputs, output: (output[0] + 0.5, None))

    linear.step(slots)

    assert_close(linear.run(x), linear.expected(x, slots, more=0.5))


@pytest.mark.parametrize("slots", [[-1] * 4, [2, -1, 0, 0]], ids=["base", "adapters"])
def test_a_step_finds_nothing_of_one_that_ended_before_its_activation(linear, slots):
    x = rows(4)
    linear.step([0, 2, 0, -1])
    with torch.inference_mode():
        linear_deferred(linear.layer, rows(4).to(DEVICE))

    linear.step(slots)

    assert_close(linear.run(x), linear.expected(x, slots))


def test_it_is_added_by_the_activations_kernel(linear, monkeypatch):
    launched, kernel = [], blocks.adapted_silu
    monkeypatch.setattr(blocks, "adapted_silu", lambda *args: launched.append(len(args[1])) or kernel(*args))
    linear.step([0, 2, 0, -1])

    linear.run(rows(4))

    assert launched == [4]


def test_a_layer_that_others_read_too_gives_its_whole_output(linear):
    x, slots = rows(5), [0, 2, -1, 0, 1]
    linear.step(slots)

    with torch.inference_mode():
        y = linear.layer(x.to(DEVICE))[0]

    assert_close(linear.activation(y).cpu(), linear.expected(x, slots))
