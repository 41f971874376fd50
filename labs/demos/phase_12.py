"""Who computes which tokens, whose a block is, what a magnitude makes of an output, and two adapters as one."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch

from labs.demos.small import numbers
from minivllm.alora.prompts import NEVER, start_of_last
from minivllm.config import LoRAConfig
from minivllm.core.block_hashes import block_hashes
from minivllm.core.request import Request
from minivllm.dora.scales import SCALE, ScaledLinears
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.wrapping import from_layer
from minivllm.mixes.weights import joined_ranks
from minivllm.sampling_params import SamplingParams


def demo_12_1() -> Iterator[str]:
    yield "an adapter is invoked by 5 5"
    for prompt in ([1, 5, 5, 2, 5, 5, 3], [1, 5, 5, 5], [1, 5, 2, 5]):
        start = start_of_last((5, 5), prompt)
        whose = [("base" if i < start else "adapter")[0] for i in range(len(prompt))]
        begins = "it never begins" if start == NEVER else f"it begins at {start}"
        yield f"{' '.join(map(str, prompt))}: {begins}; computed by {' '.join(whose)}"


def demo_12_2() -> Iterator[str]:
    def spelled_out(parent: str | None, tokens: Sequence[int], identity: int) -> str:
        return f"{parent or ''}{'bcd'[identity] * len(tokens)}"

    yield "blocks of four; who computed each token up to a block's end: b base, c and d two adapters"
    for name, identity, start in (
        ("base", 0, 0),
        ("c from token 6 on", 1, 6),
        ("d from token 8 on", 2, 8),
        ("an adapter that is not loaded, from token 6 on", None, 6),
    ):
        request = Request("r", list(range(12)), SamplingParams(), None, adapter_start=start)
        request.cache_identity = identity
        yield f"{name}: {', '.join(block_hashes(request, 3, 4, spelled_out))}"


def _linear() -> tuple[RowParallelLinear, ScaledLinears]:
    """W has the rows (3, 4) and (0, 2), and the bias is (100, 100); one slot."""
    base = RowParallelLinear(2, 2, params_dtype=torch.float64)
    base.weight.data = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    base.bias.data = torch.full((2,), 100.0, dtype=torch.float64)
    layer = from_layer(base, 1, LoRAConfig(1, 1, lora_dtype=torch.float64), [])
    return layer, ScaledLinears({"down_proj": layer})


def demo_12_3() -> Iterator[str]:
    yield "W has the rows (3, 4) and (0, 2); B A adds (0, 0) and (0, 3)"
    _, scaled = _linear()
    a = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    part = LoRALayerWeights("down_proj", 1, 1, a, torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    for magnitude in ([5.0, 5.0], [10.0, 5.0], [10.0, 2.5]):
        (scale,) = scaled.scales("down_proj", [part], [torch.tensor([magnitude], dtype=torch.float64)])
        yield f"magnitudes {numbers(torch.tensor(magnitude))}: scales less one {numbers(scale[0])}"


def demo_12_4() -> Iterator[str]:
    yield "outputs [107 105] with a bias of 100 in them; slot 0 has the scales 2 and 1"
    layer, scaled = _linear()
    layer.slots.beside[SCALE][0][0, 0, 0] = 1.0  # less one
    scaled.has_scales = True
    for name, slot in (("a row of the adapter", 0), ("a row of the base model", -1)):
        layer.backend = SimpleNamespace(
            no_lora=False, token_slots=lambda tokens, slot=slot: torch.tensor([slot])
        )
        y = torch.tensor([[107.0, 105.0]], dtype=torch.float64)
        scaled.scale(layer, (), (y, None))
        yield f"{name}: {numbers(y[0])}"


def demo_12_5() -> Iterator[str]:
    yield "B A of sql is 2 · 3, of json 5 · 1"
    held = [
        LoRALayerWeights(name, 1, 1, torch.tensor([[a]]), torch.tensor([[b]]))
        for name, b, a in (("sql", 2.0, 3.0), ("json", 5.0, 1.0))
    ]
    for weights in ((1.0, 1.0), (10.0, -1.0), (0.5, 0.0)):
        joined = joined_ranks("q_proj", list(zip(held, weights)), 2)
        added = (joined.lora_b @ joined.lora_a).item()
        said = f"A {numbers(joined.lora_a[:, 0])}, B {numbers(joined.lora_b[0])}, adds {added:g}"
        yield f"weights {weights[0]:g} and {weights[1]:g}: {said}"
