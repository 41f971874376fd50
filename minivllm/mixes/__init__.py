"""Mixes: several adapters for one request, each with a weight. In vLLM an RFC (#51940); LoRAX has `merge` for it.

Brings      `mix([(sql, 0.7), (json, 0.3)])`, a LoRARequest for W + 0.7 s B A + 0.3 s' B' A', and the field `lora_mix`
            of HTTP requests. In PEFT `add_weighted_adapter(combination_type="cat")`
Implements  an `AdapterSource`, which reads a mix as one adapter: ranks one behind the other, weights in B.
            `look_up_parts` of `AdapterRegistry`, which says what a mix's parts are when a request arrives. `mix` of
            `Extension`, for the server
Costs       some 300 lines, and nothing for other adapters. A mix takes one slot and one place in memory, and the
            sum of its parts' ranks, whatever else is there of its parts: nothing is shared with them. To load one takes
            as long as to load each of them
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension
from minivllm.mixes.request import MixRequest, mix

if TYPE_CHECKING:
    from minivllm.parts import Parts

__all__ = ["MIXES", "MixRequest", "mix"]


def _add_to(parts: "Parts") -> None:
    from minivllm.mixes.parts import MixParts
    from minivllm.mixes.weights import MixSource

    look_up = MixParts()
    parts.look_up_parts, parts.make_source = look_up, MixSource
    parts.make_listeners.append(lambda get_adapter: look_up.heard)


MIXES = Extension(add_to=_add_to, mix=mix)
