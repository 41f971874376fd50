"""What adapters cost in memory, and money, from config.json alone, before anything is loaded.

`adapted_layers`, `shapes_of` and `slot_memory` are those of `minivllm.sizing.slot_memory`, for an engine that has all
that `minivllm.assembly` has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS
from minivllm.sizing import slot_memory as sizing

GIB = 2**30

adapted_layers = partial(sizing.adapted_layers, extensions=LORA_EXTENSIONS)
shapes_of = partial(sizing.shapes_of, extensions=LORA_EXTENSIONS)
slot_memory = partial(sizing.slot_memory, extensions=LORA_EXTENSIONS)


def adapter_bytes(model: ModelArchitecture, rank: int, itemsize: int = 2) -> int:
    """Bytes of an adapter on every linear, experts and their routers included; on neither embedding nor head.

    itemsize   bytes of an element
    """
    ends = MODELS[model.architecture].embedding_modules
    adapted = {n: pairs for n, pairs in adapted_layers(model).items() if n.rpartition(".")[2] not in ends}
    return sum(rank * (k + n) for pairs in adapted.values() for k, n in pairs) * itemsize


def weight_bytes(model: ModelArchitecture, itemsize: int = 2, tp: Ranks = ONE_RANK) -> int:
    """Bytes of the base model's weights: linears and experts, their biases, norms, embedding and output."""
    base = MODELS[model.architecture](model, torch.float32, "meta", tp)
    return sum(parameter.numel() for parameter in base.parameters()) * itemsize


def kv_bytes_per_token(model: ModelArchitecture, itemsize: int = 2, tp: Ranks = ONE_RANK) -> int:
    """Bytes of a token's keys and values in all layers."""
    heads = tp.kv_heads(model.num_key_value_heads)
    return 2 * model.num_hidden_layers * (heads.stop - heads.start) * model.head_dim * itemsize


@dataclass(frozen=True)
class Plan:
    """How one device's memory is spent. Bytes, but for the last two.

    slots       `SlotMemory.total`, taken whether slots are used or not, and `SlotMemory.pages`, while all are in use
    kv_cache    what is left of the share that the engine may use
    kv_tokens   tokens whose keys and values it holds
    requests    of `context` tokens each that may run at once
    """

    weights: int
    slots: int
    kv_cache: int
    kv_tokens: int
    requests: int


def plan(
    model: ModelArchitecture,
    memory: int,
    lora_config: LoRAConfig | None,
    context: int,
    *,
    utilization: float = 0.9,
    activations: int = 2 * GIB,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    tp: Ranks = ONE_RANK,
) -> Plan:
    """Spend a device's memory: weights, activations and slots first, the rest on keys and values.

    memory          bytes of the device; `utilization` of it may be used
    lora_config     None = the base model alone
    activations     bytes that the largest step needs, CUDA graphs included: measure it for your model
    device, dtype, tp   as `slot_memory` has them; the device need not be there

    ValueError when nothing is left for a single request.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else model.dtype)
    weights = weight_bytes(model, dtype.itemsize, tp)
    needed = slot_memory(model, lora_config, device, dtype, tp) if lora_config else None
    slots = needed.total + needed.pages if needed else 0
    kv_cache = int(memory * utilization) - activations - weights - slots
    tokens = kv_cache // kv_bytes_per_token(model, dtype.itemsize, tp)
    if tokens < context:
        raise ValueError(
            f"weights ({weights / GIB:.1f} GiB), LoRA slots ({slots / GIB:.1f} GiB) and activations "
            f"({activations / GIB:.1f} GiB) leave {max(kv_cache, 0) / GIB:.1f} GiB, too little for the keys "
            f"and values of {context} tokens; lower max_loras, max_lora_rank or the context"
        )
    return Plan(weights, slots, kv_cache, tokens, tokens // context)


def cost_per_tenant(
    device_per_hour: float, tenants: int, device_tokens_per_second: float, tokens_per_tenant_hour: float
) -> float:
    """What one of many equal tenants pays an hour if all share as few devices as carry their traffic.

    device_per_hour          price of a device
    device_tokens_per_second  measured, with as many adapters in the batch as there will be
    """
    devices = -(-tenants * tokens_per_tenant_hour // (3600 * device_tokens_per_second))
    return max(devices, 1) * device_per_hour / tenants
