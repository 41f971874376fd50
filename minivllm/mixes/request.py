"""The adapter that a request names by others, and their weights."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from minivllm.errors import in_one_sentence, is_finite, shown
from minivllm.lora.request import LoRARequest

# PEFT takes any number. Every part takes rank, of which slots have some hundreds at most.
MOST_PARTS = 8

Part = LoRARequest | str


@dataclass(frozen=True)
class MixRequest(LoRARequest):
    """Names the weighted sum of other adapters, which is one adapter to all that follows: `mix` makes it.

    parts      (adapter, or the name of one that the engine knows; its weight), by name
    composed   the adapters as they are read, once the engine has looked them up (`MixParts`)
    versions   and which version of each this is: numbers, none of which comes back with other weights
    """

    is_made_of_others: ClassVar[bool] = True

    parts: tuple[tuple[Part, float], ...] = ()
    composed: tuple[LoRARequest, ...] = field(default=(), repr=False)
    versions: tuple[tuple[int, int], ...] = field(default=(), repr=False)


@in_one_sentence
def mix(parts: Iterable[tuple[Part, float]] | Mapping[Part, float]) -> MixRequest:
    """W + the sum of weight · s B A of each part, for `lora_request`: `mix([(sql, 0.7), (json, 0.3)])`.

    parts   adapters, or names of adapters that the engine knows, each with a weight: any number that is finite, also
            negative (the adapter is taken away) or 0. Of an adapter that is named twice the weights are summed. Pairs,
            or a dict of them

    Mixes of the same names with the same weights are one adapter, in whatever order they are given.

    TypeError for what is neither, ValueError for no parts or more than MOST_PARTS, a weight that is no finite number,
    a mix within a mix, and a part with `load_inplace`: load it again first.
    """
    by_name: dict[str, tuple[Part, float]] = {}
    for pair in parts.items() if isinstance(parts, Mapping) else parts:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"a mix is of pairs of an adapter and a weight, got {shown(pair)}")
        part, weight = pair
        name = _check(part, weight)
        other, before = by_name.get(name, (name, 0.0))
        if name not in (part, other) and part != other:
            raise ValueError(f"a mix has two adapters of the name '{name}'; give each adapter its own name")
        if not math.isfinite(total := before + weight):
            raise ValueError(f"the weights of adapter '{name}' in a mix are infinite together")
        by_name[name] = (other if part == name else part), total
    if not 1 <= len(by_name) <= MOST_PARTS:
        raise ValueError(f"a mix is of 1 to {MOST_PARTS} adapters, got {len(by_name)}")
    ordered = dict(sorted(by_name.items()))
    name = "+".join(f"{_quoted(name)}:{weight!r}" for name, (_, weight) in ordered.items())
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass"))
    # From 2**61 to 2**62 - 1: people's own ids are below, those of names (`stable_id`) above.
    number = 2**61 + int.from_bytes(digest.digest()[:8], "big") % 2**61
    return MixRequest(name, number, f"mix:{digest.hexdigest()}", parts=tuple(ordered.values()))


def _check(part: Part, weight: float) -> str:
    """The part's name."""
    if not isinstance(part, LoRARequest | str) or not part:
        raise TypeError(f"a mix is of LoRARequests and of adapters' names, got {shown(part)}")
    name = part if isinstance(part, str) else part.lora_name
    if not is_finite(weight):
        raise ValueError(
            f"the weight of adapter '{name}' in a mix must be a finite number, got {shown(weight)}"
        )
    if isinstance(part, MixRequest):
        raise ValueError(f"'{name}' is a mix itself; give its adapters, with weights multiplied")
    if isinstance(part, LoRARequest) and part.load_inplace:
        raise ValueError(f"adapter '{name}' has load_inplace in a mix; load it again first, then mix it")
    return name


def _quoted(name: str) -> str:
    """A name as it stands in a mix's, so that no two mixes have the same."""
    return json.dumps(name) if re.search('[+:"]', name) else name
