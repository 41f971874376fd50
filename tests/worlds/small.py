"""An engine on a model of random weights, with adapters written by hand: no transformers, no PEFT, ready at once."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from labs.demos import small
from minivllm import EngineArgs, LLMEngine, LoRARequest

Tensors = dict[str, torch.Tensor]
CONFIG = {**small.CONFIG, "num_hidden_layers": 2}
# What an adapter may adapt: width in (K), width out (N).
MODULES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 48),
    "mlp.up_proj": (32, 48),
    "mlp.down_proj": (48, 32),
    "lm_head": (32, 61),
}
USUAL = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
RANK = 4
OPTIONS = {**small.OPTIONS, "max_cpu_loras": 4, "num_kv_blocks": 100}


class SmallWorld:
    """A folder with a model's config, and adapters that are written when they are first asked for.

    config   entries of config.json that differ from CONFIG
    """

    def __init__(self, folder: Path, **config: object) -> None:
        self.folder = folder
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text(json.dumps({**CONFIG, **config}))

    def engine(self, tokenizer: object = None, **options: object) -> LLMEngine:
        """Two slots, room for four adapters, and small blocks, unless told otherwise."""
        args = EngineArgs(model=str(self.folder / "base"), **{**OPTIONS, **options})
        return LLMEngine(args.create_engine_config(), tokenizer, warm_up=args.warm_up)

    def request(self, adapter_id: int, **changes: object) -> LoRARequest | None:
        """The LoRARequest of an adapter; None for base (0)."""
        if not adapter_id:
            return None
        folder = self.folder / f"adapter{adapter_id}"
        if not folder.exists():
            write_adapter(folder, seed=adapter_id)
        values = {"lora_name": folder.name, "lora_int_id": adapter_id, "lora_path": str(folder)}
        return LoRARequest(**{**values, **changes})


def write_adapter(
    folder: Path,
    seed: int,
    *,
    modules: tuple[str, ...] = USUAL,
    rank: int = RANK,
    alpha: float = 6,
    factor: float = 1.0,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    **config: object,
) -> None:
    """A random adapter, strong enough to change answers; with factor NaN it is found bad when it is read.

    modules   of `MODULES`
    change    of the tensors, by PEFT's names, before they are saved
    config    further fields of adapter_config.json, such as use_rslora=True
    """
    generator = torch.Generator().manual_seed(seed)
    if unknown := set(modules) - set(MODULES):
        raise ValueError(f"modules {sorted(unknown)} are not in the model; it has {', '.join(MODULES)}")
    ranks = config.get("rank_pattern") or {}
    tensors = {}
    for name in names_of(modules):
        width_in, width_out = next(sizes for end, sizes in MODULES.items() if name.endswith(end))
        r = next((r for end, r in ranks.items() if name.endswith(end)), rank)
        for side, shape in (("lora_A", (r, width_in)), ("lora_B", (width_out, r))):
            weight = torch.randn(shape, generator=generator) * 0.5 * factor
            tensors[f"base_model.model.{name}.{side}.weight"] = weight
    targets = sorted({module.rpartition(".")[2] for module in modules})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, **config}
    folder.mkdir(exist_ok=True)
    save_file(change(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def names_of(modules: tuple[str, ...]) -> list[str]:
    """In the model: those of every layer, and the head."""
    inside = [module for module in modules if module != "lm_head"]
    of_layers = [f"model.layers.{i}.{name}" for i in range(CONFIG["num_hidden_layers"]) for name in inside]
    return [*of_layers, *(module for module in modules if module == "lm_head")]
