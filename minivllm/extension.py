"""What a folder beside the core adds to an engine. `minivllm.assembly` names each `Extension` in one line.

vLLM (v0.22.1) has entry points for this (vllm/plugins). Nothing of the engine is imported here, because a file of an
extension may be wanted without one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.lora.request import LoRARequest
    from minivllm.parts import Parts


@dataclass(frozen=True)
class Extension:
    """A folder beside the core. Without it and its line in `minivllm.assembly` everything else works.

    lora     fields of `LoRAExtensions` that it has something for
    add_to   puts its parts in the places of others, as `parts.config` asks for them. Extensions are asked in the
             order of assembly's lines, so one may take what an earlier one put there
    find_model   the folder of a base model that is called otherwise than by its folder; None = not known here
    mix      one adapter of several, each with a weight; None = the extension has no such
    """

    lora: Mapping[str, Any] = field(default_factory=dict)
    add_to: "Callable[[Parts], None]" = lambda parts: None
    find_model: Callable[[str], str | None] = lambda model: None
    mix: "Callable[[Iterable[tuple[LoRARequest | str, float]]], LoRARequest] | None" = None
