"""Bytes, counted where PyTorch, Triton and Python do their work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BytesMoved(TorchDispatchMode):
    """Bytes of all that operations read and write: every tensor that goes in, every one that comes out.

    Views and empty tensors are free. What is only written (`out=`) counts once, what is changed in place twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and "empty" not in func.name():
            read = {key: value for key, value in kwargs.items() if key != "out"}
            moved = tree_leaves((args, read, result))
            self.nbytes += sum(t.numel() * t.element_size() for t in moved if isinstance(t, torch.Tensor))
        return result


class Products(TorchDispatchMode):
    """How many matrix products PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in func.name()
        return func(*args, **(kwargs or {}))


def peak_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and the most bytes that PyTorch's allocator had out for it at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    held = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak


@contextmanager
def kernel_bytes() -> Iterator[list[int]]:
    """Bytes that kernels load and store meanwhile in Triton's interpreter, an entry each. Masked lanes are free."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved: list[int] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        value = load(self, pointers, mask, *more, **named)
        moved.append(int(mask.data.sum()) * value.data.itemsize)
        return value

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        moved.append(int(mask.data.sum()) * value.data.itemsize)
        return store(self, pointers, value, mask, *more, **named)

    InterpreterBuilder.create_masked_load = counted_load
    InterpreterBuilder.create_masked_store = counted_store
    try:
        yield moved
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store


@contextmanager
def bytecodes_of(module: ModuleType) -> Iterator[list[int]]:
    """How many bytecode instructions of a module's own functions run meanwhile, as the only entry of a list."""
    count = [0]

    def of_frame(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_lines = False
        count[0] += event == "opcode"
        return of_frame

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        return of_frame(frame, event, argument)

    before = sys.gettrace()
    # From 3.12 on Python looks once, when tracing begins, whether some frame wants its instructions.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(on_call)
    try:
        yield count
    finally:
        sys.settrace(before)
