"""An engine on a model of random weights, with adapters written by hand: no transformers, no PEFT, ready at once."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from labs.demos import small
from minivllm import EngineArgs, LLMEngine, LoRARequest

CONFIG = {**small.CONFIG, "num_hidden_layers": 2}
WIDTHS = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16), "mlp.down_proj": (48, 32)}  # (K, N)
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
    factor: float = 1.0,
    rank: int = RANK,
    widths: Mapping[str, tuple[int, int]] = WIDTHS,
) -> None:
    """A random adapter, strong enough to change answers; with factor NaN it is found bad when it is read.

    widths   module -> its (K, N)
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, (width_in, width_out) in widths.items():
            for name, shape in (("lora_A", (rank, width_in)), ("lora_B", (width_out, rank))):
                weight = torch.randn(shape, generator=generator) * 0.5 * factor
                tensors[f"base_model.model.model.layers.{layer}.{module}.{name}.weight"] = weight
    targets = [module.rpartition(".")[2] for module in widths]
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets})
    )
