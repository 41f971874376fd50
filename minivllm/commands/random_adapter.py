"""Random adapters for benchmarks: over all linear layers, in PEFT's layout, made without PEFT and in seconds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from minivllm.models.config import ModelArchitecture


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


def save_random_adapter(
    folder: Path, model: str, rank: int, seed: int, dtype: torch.dtype, alpha: int | None = None
) -> Path:
    """Make the adapter folder: small numbers, no A (r, K) and no B (N, r) all zeros. alpha: the rank if not given."""
    arch = ModelArchitecture.from_folder(model)
    shapes = linear_shapes(arch)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(arch.num_hidden_layers):
        for name, (width, height) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("lora_A", (rank, width)), ("lora_B", (height, rank))):
                numbers = torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)
                tensors[f"{prefix}.{side}.weight"] = numbers.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha or rank,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
