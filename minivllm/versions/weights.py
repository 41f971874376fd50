"""What a version is made of: tensors or a folder, and what of them may be otherwise than before.

Stands for the tensors that trainers give vLLM's requests (verl's `TensorLoRARequest`, say).
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from minivllm.errors import shown
from minivllm.lora.peft_helper import read_adapter_config
from minivllm.lora.request import LoRARequest


class KeptTensors(dict[str, torch.Tensor]):
    """Tensors that stay in the engine's process: outputs, which name their adapter, go to others without them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


@dataclass(frozen=True)
class LoRAVersion(LoRARequest):
    """The adapter of a request that was restarted.

    before   (version, tokens) for each version before: it sampled so many tokens of the answer, from the first on
    """

    before: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Awaited(LoRARequest):
    """The adapter of a request that waits for a version.

    least    the version that will do
    seconds  at most so long
    """

    awaits_version: ClassVar[bool] = True

    least: int = 0
    seconds: float = 0.0


# region lab 13.3: which version sampled which token
def token_versions(lora_request: LoRARequest, num_tokens: int) -> list[int | None]:
    """The version that sampled each of an answer's tokens, as far as there are any.

    lora_request   of its `RequestOutput`: a `LoRAVersion` if it was restarted
    num_tokens     of the answer, so far; the newest version goes on sampling
    """
    found: list[int | None] = []
    for version, tokens in getattr(lora_request, "before", ()):
        found += [version] * tokens
    return found + [lora_request.version] * (num_tokens - len(found))


def restarted(before: LoRARequest, num_tokens: int, newest: LoRARequest) -> LoRARequest:
    """The request of the newest version, for a request of `before` whose answer has so many tokens by now.

    It is `newest` itself where no other version sampled any token; else a `LoRAVersion` with all that `newest` has, and
    its own `before`. A version that sampled none is not named there, and nobody else's object changes.
    """
    earlier = getattr(before, "before", ())
    own = num_tokens - sum(tokens for _, tokens in earlier)
    if own:
        earlier = (*earlier, (before.version, own))
    if not earlier:
        return newest
    same = {each.name: getattr(newest, each.name) for each in fields(LoRARequest)}
    return LoRAVersion(**same, before=earlier)


# endregion


def request_of(
    before: LoRARequest,
    adapter_id: int,
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str],
    peft_config: dict[str, Any] | None,
    version: int,
) -> LoRARequest:
    """The request of a new version. ValueError for weights that are neither a folder nor tensors.

    Tensors and config are copied, because a trainer goes on writing to its own.
    """
    name, base = before.lora_name, before.base_model_name
    if isinstance(weights, str | os.PathLike):
        if peft_config is not None:
            raise ValueError("peft_config goes with tensors; a folder has its own")
        return LoRARequest(name, adapter_id, weights, base, version=version)
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights must be tensors by PEFT's names, or a folder, got {shown(weights)}")
    if wrong := [key for key, tensor in weights.items() if not isinstance(tensor, torch.Tensor)]:
        raise ValueError(f"weights must be tensors, but {shown(wrong[:3])} are none")
    if peft_config is None:
        peft_config = before.peft_config or read_adapter_config(before.lora_path)[1]
    kept = KeptTensors({name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()})
    return LoRARequest(
        name,
        adapter_id,
        base_model_name=base,
        version=version,
        lora_tensors=kept,
        peft_config=deepcopy(peft_config),
    )


def refuse_other_prompts(name: str, before: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """ValueError where prompts of the new version would be read otherwise: requests that wait were read by the old one.

    before, found   what options found of both (`LoRAModel.beside`)
    """
    changed = sorted(
        key for key in before.keys() | found.keys() if _shape(before.get(key)) != _shape(found.get(key))
    )
    if changed:
        raise ValueError(
            f"an update of adapter '{name}' may change weights, but not {', '.join(changed)}; add it under another name"
        )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value
