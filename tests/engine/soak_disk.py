"""Adapter folders that change while an engine serves them, and what transformers + PEFT make of every version."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.peft import all_in_float64, load_oracle
from tests.worlds.adapters import ADAPTERS, save_adapter
from tests.worlds.models import transformers_model

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EOS = 2
VARIANTS = ("llama-llama3-rope", "qwen2-tied", "qwen3-wide-heads", "mistral-one-kv-head")

# What may be wrong with a folder. "nan" is seen only by a look at the numbers, when the adapter is read.
SPOILED = ("missing", "no config", "cut short", "wrong shape", "rank too high", "nan")


class AdapterDisk:
    """A tiny base model and `count` adapter folders for it, ids 1..count.

    num_versions   written so far; a version written later has a larger number
    state   adapter id -> the version that is in its folder, or what is wrong with it (one of SPOILED)
    """

    def __init__(self, folder: Path, variant: str, count: int) -> None:
        self.folder = folder
        self.base = folder / "base"
        transformers_model(variant, **TINY).to(torch.float64).save_pretrained(self.base)
        self.state: dict[int, int | str] = {}
        self.weights: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.num_versions = 0
        configs = list(ADAPTERS.values())
        for adapter_id in range(1, count + 1):
            template = folder / f"template{adapter_id % len(configs)}"
            if not template.exists():
                save_adapter(template, self.base, adapter_id, **configs[adapter_id % len(configs)])
            self.write(adapter_id)

    def path(self, adapter_id: int) -> Path:
        return self.folder / f"adapter{adapter_id}"

    def template(self, adapter_id: int) -> Path:
        return self.folder / f"template{adapter_id % len(ADAPTERS)}"

    def is_good(self, adapter_id: int) -> bool:
        return isinstance(self.state[adapter_id], int)

    def write(self, adapter_id: int) -> int:
        """Put new random weights into the folder, over what is there; their version."""
        path = self.path(adapter_id)
        shutil.copytree(self.template(adapter_id), path, dirs_exist_ok=True)
        self.num_versions += 1
        version = self.num_versions
        generator = torch.Generator().manual_seed(version)
        old = load_file(self.template(adapter_id) / "adapter_model.safetensors")
        new = {
            name: torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.4
            for name, weight in old.items()
        }
        save_file(new, path / "adapter_model.safetensors")
        self.state[adapter_id] = version
        self.weights[adapter_id, version] = new
        return version

    def spoil(self, adapter_id: int, how: str) -> None:
        """Make a good folder a bad one."""
        path = self.path(adapter_id)
        weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
        tensors = load_file(self.template(adapter_id) / "adapter_model.safetensors")
        if how == "missing":
            shutil.rmtree(path)
        elif how == "no config":
            config.unlink()
        elif how == "cut short":
            weights.write_bytes(weights.read_bytes()[:-50])
        elif how == "wrong shape":
            save_file({name: tensor[:, :-1].contiguous() for name, tensor in tensors.items()}, weights)
        elif how == "rank too high":
            config.write_text(json.dumps({**json.loads(config.read_text()), "r": 500}))
        elif how == "nan":
            save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, weights)
        self.state[adapter_id] = how

    def is_bad_at_first_sight(self, adapter_id: int) -> bool:
        return self.state[adapter_id] in set(SPOILED) - {"nan"}


class VersionedOracle:
    """transformers + PEFT, which take the weights of any version of any adapter of a disk."""

    def __init__(self, disk: AdapterDisk) -> None:
        from peft import LoraConfig, get_peft_model

        self.disk = disk
        self.model = load_oracle(disk.base)
        all_in_float64(self.model)
        for adapter_id in disk.state:
            config = LoraConfig.from_pretrained(disk.template(adapter_id))
            if adapter_id == 1:
                self.model = get_peft_model(self.model, config, adapter_name="1")
            else:
                self.model.add_adapter(str(adapter_id), config)
        self.model.to(torch.float64).eval()

    @torch.inference_mode()
    def logits(self, adapter_id: int, version: int, texts: list[list[int]]) -> torch.Tensor:
        """Of texts, each as if it were alone: (texts, longest, V). What pads them comes behind them."""
        from peft import set_peft_model_state_dict

        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        if adapter_id == 0:
            with self.model.disable_adapter():
                return self.model(padded).logits
        weights = self.disk.weights[adapter_id, version]
        missed = set_peft_model_state_dict(self.model, weights, adapter_name=str(adapter_id))
        assert not missed.unexpected_keys
        self.model.set_adapter(str(adapter_id))
        return self.model(padded).logits
