"""What happens while a test's code runs: functions entered, products asked for, tensors made out of nothing."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Names of all multiplications that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mul" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class NewTensors(TorchFunctionMode):
    """Notes where tensors are made out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("arange", "zeros", "ones", "full", "empty", "tensor"):
            self.devices.append(result.device.type)
        return result


PACKAGE = Path(__file__).resolve().parents[2] / "minivllm"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise")
# Parts of a function that are no functions to their reader.
INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Calls:
    """A context that notes what is entered while it is open, by this thread and those that it starts.

    functions   (file below minivllm/, qualified name) -> how often it was entered. A module that is imported is a
                function `<module>`. Comprehensions and generators are part of what they stand in.
    """

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], int] = {}
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    def __enter__(self) -> "Calls":
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def files(self) -> list[str]:
        """In the order in which they were entered first."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def __str__(self) -> str:
        lines = []
        for file in self.files:
            names = [f"{name} {n}" for (at, name), n in self.functions.items() if at == file]
            lines.append(f"  {file}: {', '.join(names)}")
        return f"{len(self.files)} files, {len(self.functions)} functions\n" + "\n".join(lines)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = name_of(code)
        if name := self._names[code]:
            self.functions[name] = self.functions.get(name, 0) + 1


def name_of(code: CodeType) -> tuple[str, str] | None:
    """None outside of the package, and for a part of a function."""
    if not code.co_filename.startswith(f"{PACKAGE}{os.sep}") or code.co_name in INNER:
        return None
    return Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname


class FirstProduct(TorchDispatchMode):
    """A context that calls `reached` before the first product of matrices in it."""

    def __init__(self, reached: Callable[[], None]) -> None:
        super().__init__()
        self.reached: Callable[[], None] | None = reached

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self.reached and function.overloadpacket.__name__ in PRODUCTS:
            self.reached()
            self.reached = None
        return function(*args, **(kwargs or {}))
