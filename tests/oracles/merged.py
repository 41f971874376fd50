"""Random adapters as PEFT saves them, and what PEFT merges. Nothing of minivllm is used here."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.worlds.models import transformers_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONFIGS = {
    "q and v": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "one module": {"r": 2, "lora_alpha": 3, "target_modules": ["model.layers.1.mlp.down_proj"]},
    "all linear, float alpha": {"r": 5, "lora_alpha": 3.5, "target_modules": "all-linear"},
    "negative alpha": {"r": 4, "lora_alpha": -6, "target_modules": ["up_proj"]},
    "targets by a regex": {"r": 3, "lora_alpha": 4, "target_modules": r".*\.0\..*(q|up)_proj"},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 6,
        "lora_alpha": 7,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"o_proj": 2, "layers.1.self_attn.q_proj": 12},
        "alpha_pattern": {"down_proj": 13.5, "layers.0.self_attn.k_proj": 3},
    },
    "rslora with patterns that meet in one module": {
        "r": 4,
        "lora_alpha": 7,
        "use_rslora": True,
        "target_modules": ATTENTION,
        "rank_pattern": {"k_proj": 9, "layers.1.self_attn.v_proj": 1},
        "alpha_pattern": {"k_proj": 2.25, "o_proj": 30},
    },
    "patterns that are regexes": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ATTENTION,
        "rank_pattern": {r"layers\.[1-9]\.self_attn\.(q|k)_proj": 7, "^model.layers.0.self_attn.v_proj": 2},
        "alpha_pattern": {"(q|v)_proj": 6, r".*\.1\..*_proj": 11},
    },
}


class PeftAdapters:
    """PEFT's adapters on one tiny model, and what PEFT makes of them.

    new_folder   name -> a folder for an adapter, for callers of `make` that name none
    sizes        of the model, where they are not those of `worlds.models`
    """

    def __init__(self, new_folder: Callable[[str], Path] | None = None, **sizes: int) -> None:
        self.new_folder = new_folder
        self.base = transformers_model("llama-llama3-rope", **sizes).double()
        self.weights = {name: p.detach().clone() for name, p in self.base.named_parameters()}

    def make(self, config, reload=False, save_dtype=None, folder=None):
        """A folder with a random adapter, and module name -> merged minus base weight, where they differ.

        reload       merge what PEFT reads from the folder instead of what it saved there
        save_dtype   of the tensors in the folder
        folder       where it is to be made
        """
        import peft

        folder = folder or self.new_folder("adapter")
        adapted = peft.get_peft_model(self.base, peft.LoraConfig(**config))
        generator = torch.Generator().manual_seed(len(str(config)))
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                if save_dtype is not None:
                    weight.data = weight.data.to(save_dtype).double()
        adapted.save_pretrained(folder)
        if save_dtype is not None:
            self._convert(folder / "adapter_model.safetensors", save_dtype)
        if reload:
            self._take_off(adapted)
            adapted = peft.PeftModel.from_pretrained(self.base, folder)
        return folder, self._deltas(adapted)

    def _deltas(self, adapted):
        merged = dict(adapted.merge_and_unload().named_parameters())
        deltas = {name.removesuffix(".weight"): merged[name] - old for name, old in self.weights.items()}
        self._restore()
        return {name: delta.detach() for name, delta in deltas.items() if delta.any()}

    def _take_off(self, adapted):
        adapted.unload()
        self._restore()

    def _restore(self):
        for name, parameter in self.base.named_parameters():
            parameter.data = self.weights[name].clone()

    @staticmethod
    def _convert(path, dtype):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
