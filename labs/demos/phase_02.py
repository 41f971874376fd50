"""Slots of layers."""

from collections.abc import Iterator

import torch

from labs.demos.small import H, SmallModel, adapter, numbers, weights
from minivllm.config import LoRAConfig
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.slots import Slots
from minivllm.lora.wrapping import WrappedModules

DTYPE = torch.float64


def demo_2_1() -> Iterator[str]:
    slots = Slots.empty(4, 8, [(576, 576), (576, 192)], torch.float32, "cpu")
    for i, name in enumerate("qv"):
        yield f"{name}: A {tuple(slots.a[i].shape)}, B {tuple(slots.b[i].shape)}, live ranks {slots.live_ranks[i]}"
    kilobytes = sum(tensor.nbytes for tensor in slots.memory) / 1000
    is_empty = not any(tensor.any() for tensor in slots.memory)
    yield f"{kilobytes:g} kB for 4 adapters of rank 8 at most, {'all zeros' if is_empty else 'not empty'}"
    slots.live_ranks[0][2] = 5
    yield f"a live rank of 5 for q in slot 2: {slots.live_ranks}"
    small = Slots.empty(2, 4, [(2, 3)], torch.float32, "cpu")
    for said, made in (("by row", small), ("by column", small.by_column())):
        places = torch.arange(24.0).as_strided(made.b[0].shape, made.b[0].stride())
        yield f"B of slot 1, N = 3 and R = 4, {said}: columns 0 and 1 are {numbers(places[1, 0, :, :2].t())}"


def demo_2_2() -> Iterator[str]:
    slots = Slots.empty(2, 6, [(H, H)], DTYPE, "cpu")
    yield f"adapters {H} wide: A is 1, B is 1 in the first and 5 in the second"
    slots.beside = {"bias": (torch.zeros(2, 1, H, dtype=DTYPE),)}
    for said, parts in (
        ("rank 6 comes", [weights("q", 6)]),
        ("rank 2 follows", [weights("q", 2, 5.0)]),
        ("it is cleared", None),
    ):
        slots.write(1, parts) if parts else slots.clear(1)
        a, b = slots.a[0][:, 0].abs().sum(dim=2), slots.b[0][:, 0].abs().sum(dim=1)
        yield f"{said}: live rank {slots.live_ranks[0][1]}"
        yield f"  sums of the rows of A {numbers(a[1])}, of the columns of B {numbers(b[1])}"
    yield f"slot 0 was never written: {'zeros' if not slots.a[0][0].any() else 'something is in it'}"


def small_model() -> tuple[SmallModel, WrappedModules]:
    model = SmallModel()
    config = LoRAConfig(max_loras=2, max_lora_rank=4)
    return model, WrappedModules(model, config, RunsBackend("cpu"))


def demo_2_5() -> Iterator[str]:
    yield "before: " + ", ".join(f"{n} {type(m).__name__}" for n, m in SmallModel().named_children())
    model, wrapped = small_model()
    for name, layer in model.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield f"{name}: {type(layer).__name__}"
    yield f"one wrapper for both names: {model.o_proj is model.o_proj_again}"
    yield f"what an adapter may name: {wrapped.claims}"
    yield f"slices by name: {model.qkv_proj.targets if 'qkv_proj' in wrapped.modules else {}}"


def demo_2_7() -> Iterator[str]:
    _, wrapped = small_model()
    first, second = adapter(1, "q_proj", "o_proj", rank=3), adapter(2, "o_proj", rank=2)
    for lora in (first, second):
        wrapped.accept(lora)
        wrapped.write(lora, 0)
        ranks = {name: [live[0] for live in m.slots.live_ranks] for name, m in wrapped.modules.items()}
        yield f"adapter {lora.id} has {list(lora.loras)}; live ranks of slot 0 are now {ranks}"
    try:
        wrapped.accept(adapter(3, "o_proj", "gate_proj"))
        yield "adapter 3 names a gate_proj, which nobody has, and is taken"
    except ValueError as error:
        yield f"adapter 3 is refused: {error}"
    wrapped.modules["o_proj"].write = fail_to_copy
    try:
        wrapped.write(first, 0)
    except OSError as error:
        ranks = {name: [live[0] for live in m.slots.live_ranks] for name, m in wrapped.modules.items()}
        yield f"a copy breaks off ({error}): live ranks of slot 0 are now {ranks}"


def fail_to_copy(slot: int, weights: object) -> None:
    raise OSError("the device is gone")
