"""Tiny base models on disk, random PEFT adapters for them, and what transformers + PEFT answer.

The oracle of most engine tests: nothing of minivllm is used here.
"""

import json
import shutil
from pathlib import Path

import torch
from tiny_models import transformers_model

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


def save_base(folder: Path, variant: str = "llama-llama3-rope", dtype: torch.dtype = torch.float64) -> Path:
    """A tiny random model as a Hugging Face folder."""
    transformers_model(variant).to(dtype).save_pretrained(folder)
    return folder


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


def stretch_positions(base: Path, folder: Path, factor: float) -> Path:
    """The same model with linearly scaled positions: what an adapter for a longer context was trained on."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": config["rope_parameters"]["rope_theta"]}
    config["rope_parameters"] = {**rope, "factor": factor * config["rope_parameters"].get("factor", 1)}
    config["max_position_embeddings"] = int(config["max_position_embeddings"] * factor)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_json(path: Path, **changes: object) -> None:
    """Overwrite entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load_oracle(
    base: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float64, **options: object
) -> torch.nn.Module:
    """transformers' model, with PEFT's adapter on it. options: more for from_pretrained"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).to(dtype)
    return model.eval()


@torch.no_grad()
def greedy_tokens(oracle: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' generate answers, with no end but the length."""
    output = oracle.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
