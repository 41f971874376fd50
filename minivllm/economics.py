"""What adapters cost in memory, from config.json alone, before anything is loaded.

vLLM 0.22.1 finds out by allocating (`determine_available_memory`, vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minivllm.config import LoRAConfig
from minivllm.lora.names import is_in_target_modules
from minivllm.models.config import ModelArchitecture

GIB = 2**30
INT64 = torch.int64.itemsize
# As the backends and the slot writer round: columns of a folded product, and bytes of a matrix on its way.
FOLDED_ROWS = 8
ARRIVAL_BYTES = 16


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer that adapters may name.

    name    as the engine calls it
    parts   what checkpoints call its parts -> (K, N): A of the part is (r, K), B is (N, r)
    kind    "linear", "experts", "embedding" or "head"
    copies  of each part: the experts, else 1
    biases  base biases, elements
    """

    name: str
    parts: dict[str, tuple[int, int]]
    kind: str = "linear"
    copies: int = 1
    biases: int = 0

    @property
    def height(self) -> int:
        """N of all parts together."""
        return sum(height for _, height in self.parts.values())

    def is_in(self, target_modules: list[str] | None) -> bool:
        """Whether `LoRAConfig.target_modules` has it wrapped."""
        last = self.name.rpartition(".")[2]
        names = list(self.parts)
        if self.kind == "experts":
            names = [f"{last}.{expert}.{part}" for expert in range(self.copies) for part in names]
        return is_in_target_modules(self.name, target_modules, {last: names})

    def pairs(self, extra_vocab: int = 0) -> list[tuple[int, int]]:
        """(K, N) of every pair of A and B in a slot; `extra_vocab` tokens make the vocabulary's side longer."""
        longer = {"embedding": (extra_vocab, 0), "head": (0, extra_vocab)}.get(self.kind, (0, 0))
        return [(k + longer[0], n + longer[1]) for k, n in self.parts.values()] * self.copies


def adapted_layers(model: ModelArchitecture) -> Iterator[AdaptedLayer]:
    """Every layer of a model that adapters may name, from the embedding to the head."""
    hidden, vocab = model.hidden_size, model.vocab_size
    yield AdaptedLayer("model.embed_tokens", {"embed_tokens": (vocab, hidden)}, "embedding")
    for layer in range(model.num_hidden_layers):
        yield from _layers_of_block(model, f"model.layers.{layer}.", layer in model.sparse_layers)
    yield AdaptedLayer("lm_head", {"lm_head": (hidden, vocab)}, "head")


def _layers_of_block(model: ModelArchitecture, prefix: str, is_sparse: bool) -> Iterator[AdaptedLayer]:
    hidden = model.hidden_size
    q, kv = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    qkv = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv)}
    yield AdaptedLayer(f"{prefix}self_attn.qkv_proj", qkv, biases=model.qkv_bias * (q + 2 * kv))
    yield AdaptedLayer(f"{prefix}self_attn.o_proj", {"o_proj": (q, hidden)}, biases=model.o_bias * hidden)
    inner = model.moe_intermediate_size if is_sparse else model.intermediate_size
    if is_sparse:
        yield AdaptedLayer(f"{prefix}mlp.gate", {"gate": (hidden, model.num_experts)})
        spelt = ("w1", "w2", "w3") if model.model_type == "mixtral" else ("gate_proj", "down_proj", "up_proj")
        experts = dict(zip(spelt, ((hidden, inner), (inner, hidden), (hidden, inner))))
        yield AdaptedLayer(f"{prefix}mlp.experts", experts, "experts", model.num_experts)
    else:
        biased = int(model.mlp_bias)
        gate_up = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
        yield AdaptedLayer(f"{prefix}mlp.gate_up_proj", gate_up, biases=biased * 2 * inner)
        yield AdaptedLayer(f"{prefix}mlp.down_proj", {"down_proj": (inner, hidden)}, biases=biased * hidden)


def adapter_bytes(model: ModelArchitecture, rank: int, itemsize: int = 2) -> int:
    """Bytes of an adapter on every linear, experts and their routers included; on neither embedding nor head.

    itemsize   bytes of an element
    """
    adapted = (layer for layer in adapted_layers(model) if layer.kind in ("linear", "experts"))
    return sum(rank * (k + n) for layer in adapted for k, n in layer.pairs()) * itemsize


def weight_bytes(model: ModelArchitecture, itemsize: int = 2) -> int:
    """Bytes of the base model's weights: linears and experts, their biases, norms, embedding and output."""
    tied = {"head"} if model.tie_word_embeddings else set()
    layers = [layer for layer in adapted_layers(model) if layer.kind not in tied]
    matrices = sum(k * n for layer in layers for k, n in layer.pairs())
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    norms = model.num_hidden_layers * norms + model.hidden_size
    return (matrices + sum(layer.biases for layer in layers) + norms) * itemsize


def kv_bytes_per_token(model: ModelArchitecture, itemsize: int = 2) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


@dataclass(frozen=True)
class SlotMemory:
    """What LoRA takes on a device beside the base model, in bytes, whether adapters are there or not.

    Letters as everywhere: S slots of rank R, for a part with A (r, K) and B (N, r); n parts in a layer.

    a_and_b   S * R * (K + N) elements for every part of every layer that is wrapped, E times that for E experts
    beside    what adapters may have beside A and B. `bias_enabled`: S * N for every part of a linear.
              `lora_extra_vocab_size` X: S * X * H for the embedding and for the head, whose V is V + X in `a_and_b`
    layout    more that a backend takes for its way to lay slots out. "folded" rounds the rows of base weight and A
              up to a multiple of eight, and a base bias is as long as these
    staging   on a GPU: the buffer that an adapter arrives in, as long as the largest that fits into a slot, and 24
              bytes for each of its matrices
    tables    on a GPU: where each matrix of a slot lies, 48 bytes each, and live ranks, 4 bytes a part and slot.
              Everywhere, with `long_lora_scaling_factors`: cosines and sines of the model's own positions once more,
              and of those of each factor

    Not in it: what a GPU backend keeps for the rows of a step, some 12 bytes for each that there can be; and what
    PyTorch's allocator rounds up, which for each "folded" weight may be 1 MiB.
    """

    a_and_b: int
    beside: int
    layout: int
    staging: int
    tables: int

    @property
    def slots(self) -> int:
        """The slot buffers: what grows with `max_loras`."""
        return self.a_and_b + self.beside + self.layout

    @property
    def total(self) -> int:
        return self.slots + self.staging + self.tables


def slot_memory(
    model: ModelArchitecture,
    lora_config: LoRAConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> SlotMemory:
    """What slots of this configuration will take on a device, before any is allocated.

    device   it need not be there: "cuda" may be asked about anywhere
    dtype    of the model, and of slots whose `lora_dtype` is "auto"; None = float32 on a CPU, the checkpoint's on a GPU
    """
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (model.dtype if on_gpu else torch.float32)
    slot_dtype, backend = lora_config.slot_dtype(dtype), lora_config.backend_on(device)
    wrapped = [layer for layer in adapted_layers(model) if layer.is_in(lora_config.target_modules)]
    slots, rank, item = lora_config.max_loras, lora_config.max_lora_rank, slot_dtype.itemsize
    matrices = [size * rank for size in _sizes(wrapped, lora_config)]
    beside = [size for layer in wrapped for size in _sizes_beside(layer, model, lora_config)]
    layout = sum(_layout(layer, backend, slots, rank) for layer in wrapped)
    pieces = [size * item for size in (*matrices, *beside)]
    tables = _rotary_bytes(model, lora_config, dtype)
    if lora_config.lora_extra_vocab_size and any(layer.kind == "head" for layer in wrapped):
        tables += slots * INT64  # how many tokens each adapter adds
    if backend in ("triton", "folded"):
        tables += sum(len(layer.parts) for layer in wrapped) * slots * torch.int32.itemsize
    if on_gpu:
        tables += len(pieces) * 6 * INT64
    return SlotMemory(
        a_and_b=slots * sum(matrices) * item,
        beside=slots * sum(beside) * item,
        layout=layout * item,
        staging=sum(map(_aligned, (len(pieces) * 3 * INT64, *pieces))) if on_gpu else 0,
        tables=tables,
    )


def _sizes(layers: list[AdaptedLayer], lora_config: LoRAConfig) -> list[int]:
    """K and N of every pair: the elements of its A and B, at rank 1."""
    pairs = (pair for layer in layers for pair in layer.pairs(lora_config.lora_extra_vocab_size))
    return [size for pair in pairs for size in pair]


def _sizes_beside(layer: AdaptedLayer, model: ModelArchitecture, lora_config: LoRAConfig) -> list[int]:
    """Elements of each tensor that an adapter may have for a layer beside A and B."""
    if layer.kind == "linear" and lora_config.bias_enabled:
        return [height for _, height in layer.parts.values()]
    extra = lora_config.lora_extra_vocab_size
    return [extra * model.hidden_size] if layer.kind in ("embedding", "head") and extra else []


def _layout(layer: AdaptedLayer, backend: str, slots: int, rank: int) -> int:
    """Elements that a backend takes for a layer beyond the slots themselves."""
    if layer.kind != "linear":
        return 0
    if backend == "folded":
        folded = slots * rank * len(layer.parts)
        unused = -(layer.height + folded) % FOLDED_ROWS
        width, _ = next(iter(layer.parts.values()))
        return unused * width + (folded + unused if layer.biases else 0)
    return 0


def _rotary_bytes(model: ModelArchitecture, lora_config: LoRAConfig, dtype: torch.dtype) -> int:
    """Of the tables that adapters for longer contexts read: the model's own once more, then one for each factor."""
    factors = lora_config.long_lora_scaling_factors
    if not factors:
        return 0
    positions = sum(math.ceil(model.max_position_embeddings * factor) for factor in (1, *factors))
    item = torch.promote_types(dtype, torch.float32).itemsize
    return 2 * positions * model.head_dim * item + (lora_config.max_loras + 1) * INT64


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ARRIVAL_BYTES) * ARRIVAL_BYTES


@dataclass(frozen=True)
class Plan:
    """How one device's memory is spent. Bytes, but for the last two.

    slots       `SlotMemory.total`, taken whether slots are used or not
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
) -> Plan:
    """Spend a device's memory: weights, activations and slots first, the rest on keys and values.

    memory          bytes of the device; `utilization` of it may be used
    lora_config     None = the base model alone
    activations     bytes that the largest step needs, CUDA graphs included: measure it for your model
    device, dtype   as `slot_memory` has them; the device need not be there

    ValueError when nothing is left for a single request.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else model.dtype)
    weights = weight_bytes(model, dtype.itemsize)
    slots = slot_memory(model, lora_config, device, dtype).total if lora_config else 0
    kv_cache = int(memory * utilization) - activations - weights - slots
    tokens = kv_cache // kv_bytes_per_token(model, dtype.itemsize)
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
