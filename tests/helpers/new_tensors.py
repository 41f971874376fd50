"""Where new tensors are made, for code that must not move them between devices."""

from typing import Any

from torch.overrides import TorchFunctionMode


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
