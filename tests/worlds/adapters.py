"""Adapters' folders: random ones that PEFT makes for a model of `tests.worlds.models`."""

import json
from pathlib import Path

import torch

from minivllm import LoRARequest

# Adapters that differ where engines trip: rank, scaling, targets, patterns.
ADAPTERS = {
    "qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "mlp": {"r": 3, "lora_alpha": 5.5, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "patterns": {
        "r": 6,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"],
        "rank_pattern": {"o_proj": 2, "layers.1.self_attn.q_proj": 12},
        "alpha_pattern": {"down_proj": 13, "layers.0.self_attn.k_proj": 3},
    },
}


def save_adapter(folder: Path, base: Path, seed: int, **config: object) -> Path:
    """A random PEFT adapter for the model in `base`, strong enough to change its answers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**config))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def change_json(path: Path, **changes: object) -> None:
    """Overwrite entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class AdapterFolders:
    """Adapters in folders of their own.

    folder   where these lie, each under its adapter's name
    names    of the adapters; the id of names[i] is i + 1
    """

    folder: Path
    names: list[str]

    def path(self, name: str) -> Path:
        return self.folder / name

    def request(self, name: str | None, **changes: object) -> LoRARequest | None:
        """The LoRARequest that names one of the adapters; None for the base model."""
        if name is None:
            return None
        values = {
            "lora_name": name,
            "lora_int_id": self.names.index(name) + 1,
            "lora_path": str(self.path(name)),
        }
        return LoRARequest(**{**values, **changes})
