"""Random adapters over all linear layers, in PEFT's layout, made without PEFT and in seconds."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from minivllm.lora.request import LoRARequest
from minivllm.models.config import ModelArchitecture

# Adapters whose numbers differ; further ones are other folders with links to the same weight files. Speed does
# not depend on the numbers: the engine reads, keeps and copies every folder by itself.
DISTINCT = 4
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(
    folder: Path, model: str, count: int, rank: int, dtype: torch.dtype = torch.bfloat16
) -> list[LoRARequest]:
    """Write `count` adapter folders under `folder`; requests with ids 1 to `count` that name them."""
    requests = []
    for number in range(count):
        path = folder / f"adapter-{number + 1}"
        path.mkdir(parents=True)
        (path / CONFIG).write_text(json.dumps(_config(rank)))
        if number < DISTINCT:
            save_file(_random_tensors(model, rank, dtype, seed=number), path / WEIGHTS)
        else:
            os.link(folder / f"adapter-{number % DISTINCT + 1}" / WEIGHTS, path / WEIGHTS)
        requests.append(LoRARequest(path.name, number + 1, str(path)))
    return requests


def linear_shapes(arch: ModelArchitecture) -> dict[str, tuple[int, int]]:
    """Name of each linear of a decoder layer, as checkpoints have it -> (K, N)."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_width, kv_width = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    return {
        "self_attn.q_proj": (hidden, q_width),
        "self_attn.k_proj": (hidden, kv_width),
        "self_attn.v_proj": (hidden, kv_width),
        "self_attn.o_proj": (q_width, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _random_tensors(model: str, rank: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """PEFT name -> tensor, A (r, K) and B (N, r): small numbers, none of them all zeros."""
    arch = ModelArchitecture.from_folder(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(arch.num_hidden_layers):
        for name, (width, height) in linear_shapes(arch).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("lora_A", (rank, width)), ("lora_B", (height, rank))):
                numbers = torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)
                tensors[f"{prefix}.{side}.weight"] = numbers.to(dtype)
    return tensors


def _config(rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }
