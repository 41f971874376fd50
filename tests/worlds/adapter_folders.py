"""Adapter folders written by hand, without PEFT, so that anything in them can be wrong."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from tests.tools.limits import Peak, TimeLimit

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Q, V, DOWN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.0.mlp.down_proj",
)
WIDTHS = {Q: (6, 10), V: (6, 4), DOWN: (14, 6)}  # (K, N)
MODEL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
RANK = 3

HANGS = 60  # seconds of computing; a refusal takes less than one
MOST_MEMORY = 256 * 2**20


def good_config(**changes):
    """An adapter_config.json as PEFT writes it, with changes; `...` takes a field out."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/model",
        "r": RANK,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not ...}


def good_tensors(dtype=torch.float32, rank=RANK, seed=0):
    """PEFT's name -> random tensor, for the modules of WIDTHS."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (width_in, width_out) in WIDTHS.items():
        a, b = (torch.randn(s, generator=generator) for s in ((rank, width_in), (width_out, rank)))
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    return tensors


def write(folder: Path, config=None, tensors=None) -> Path:
    """A folder with a config and a safetensors file, good ones unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(good_config() if config is None else config))
    save_file(good_tensors() if tensors is None else tensors, folder / WEIGHTS)
    return folder


def write_safetensors(path: Path, header: dict | bytes, data: bytes = b"", more: int = 0) -> None:
    """A safetensors file whose header need not be true; `more` bytes behind its data take no place on the disk."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    set_size(path, path.stat().st_size + more)


def read_safetensors(path: Path) -> tuple[dict, bytes]:
    """The header and what follows it."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def set_size(path: Path, size: int) -> None:
    """The file is cut, or longer by bytes that take no place on the disk."""
    with path.open("ab") as file:
        file.truncate(size)


def load(folder, max_lora_rank=16, expected=MODEL_MODULES, dtype=torch.float32, **options) -> LoRAModel:
    """Everything an adapter folder goes through before it meets a model."""
    helper = PEFTHelper.from_local_dir(str(folder), extensions=LORA_EXTENSIONS)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_lora_rank))
    return LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, lora_model_id=1, dtype=dtype, **options
    )


def assert_refused(folder, *words, error=ValueError, ways=("whole", "shapes only"), **options) -> None:
    """Reading it raises `error` with all the words, before it takes long or much memory."""
    __tracebackhide__ = True
    for way in ways:
        peak = Peak()
        with TimeLimit(HANGS), pytest.raises(error) as raised:
            load(folder, shapes_only=way == "shapes only", **options)

        missing = [word for word in words if str(word) not in str(raised.value)]
        assert not missing, f"{way}: {missing} not in: {raised.value}"
        assert peak.growth() < MOST_MEMORY
