"""Adapters that learn: their weights are replaced while requests run, and each request says which it had.

Brings      `update_lora(adapter, tensors)` of an engine, `RequestOutput.lora_version`, requests that wait for a
            version (`AtLeast`), and for trainers the loss of answers that an older version sampled. vLLM (v0.22.1)
            reads an adapter again under requests that run, which then go on with keys and values of both; trainers
            register every version under another name (TRL), or stop the engine meanwhile. docs/versions.md
Implements  `AdapterRegistry`: `VersionedRegistry`. A version is an adapter of its own, with an id of its own, to the
            scheduler, to slots and to the prefix cache, and so nothing in them knows of versions
Costs       some 510 lines. Requests of two versions take two slots, and memory holds both. The engine keeps a copy of
            the newest tensors, to read them again after an eviction. A request of an adapter that is never updated
            enters two functions more when it is added
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    from functools import partial

    from minivllm.versions.registry import VersionedRegistry

    size = parts.config.parallel_config.tensor_parallel_size
    parts.make_registry = partial(VersionedRegistry, tensor_parallel_size=size)


VERSIONS = Extension(add_to=_add_to)
