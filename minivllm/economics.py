"""What adapters cost in memory, from config.json alone, before anything is loaded.

vLLM 0.22.1 finds out by allocating (`determine_available_memory`, vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.models.config import ModelArchitecture

GIB = 2**30


def linear_shapes(model: ModelArchitecture) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The linears of one layer: name -> (K, widths N_i of its slices)."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    return {
        "qkv_proj": (hidden, (q, kv, kv)),
        "o_proj": (q, (hidden,)),
        "gate_up_proj": (hidden, (inner, inner)),
        "down_proj": (inner, (hidden,)),
    }


def adapter_bytes(model: ModelArchitecture, rank: int, itemsize: int = 2) -> int:
    """Bytes of an adapter on every linear; with R for the rank, of a slot.

    itemsize   bytes of an element
    """
    a_and_b = sum(len(widths) * rank * k + rank * sum(widths) for k, widths in linear_shapes(model).values())
    return model.num_hidden_layers * a_and_b * itemsize


def weight_bytes(model: ModelArchitecture, itemsize: int = 2) -> int:
    """Bytes of the base model's weights: linears, their biases, norms, embedding and output."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    shapes = linear_shapes(model)
    linears = sum(k * sum(widths) for k, widths in shapes.values())
    has_bias = {
        "qkv_proj": model.qkv_bias,
        "o_proj": model.o_bias,
        "gate_up_proj": model.mlp_bias,
        "down_proj": model.mlp_bias,
    }
    biases = sum(sum(widths) for name, (_, widths) in shapes.items() if has_bias[name])
    norms = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0)
    vocabulary = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return (layers * (linears + biases + norms) + hidden + vocabulary) * itemsize


def kv_bytes_per_token(model: ModelArchitecture, itemsize: int = 2) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


@dataclass(frozen=True)
class Plan:
    """How one device's memory is spent. Bytes, but for the last two.

    slots       of `max_loras` adapters of `max_lora_rank`, allocated whether they are used or not
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
    max_loras: int,
    max_lora_rank: int,
    context: int,
    *,
    utilization: float = 0.9,
    activations: int = 2 * GIB,
    itemsize: int = 2,
) -> Plan:
    """Spend a device's memory: weights, activations and slots first, the rest on keys and values.

    memory        bytes of the device; `utilization` of it may be used
    activations   bytes that the largest step needs, CUDA graphs included: measure it for your model

    ValueError when nothing is left for a single request.
    """
    weights = weight_bytes(model, itemsize)
    slots = max_loras * adapter_bytes(model, max_lora_rank, itemsize)
    kv_cache = int(memory * utilization) - activations - weights - slots
    tokens = kv_cache // kv_bytes_per_token(model, itemsize)
    if tokens < context:
        raise ValueError(
            f"weights ({weights / GIB:.1f} GiB), {max_loras} slots ({slots / GIB:.1f} GiB) and activations "
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
