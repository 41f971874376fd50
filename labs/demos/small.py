"""What demos run on: numbers that can be read, a model of two linears, an engine with random weights."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from minivllm import EngineArgs, LLMEngine, LoRARequest
from minivllm.layers.linear import QKVParallelLinear, RowParallelLinear
from minivllm.lora.backend import Backend
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.slots import Slots

H = 4  # the width of the small model
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float64",
    "device": "cpu",
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "block_size": 4,
    "num_kv_blocks": 40,
    "warm_up": False,
}
Q_PROJ, O_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def numbers(tensor: torch.Tensor) -> str:
    """A row, or rows below each other: `[1.5 0]`."""
    if tensor.ndim > 1:
        return " ".join(numbers(row) for row in tensor)
    return f"[{' '.join(f'{value:g}' for value in tensor.tolist())}]"


def bars(row: torch.Tensor, most: float) -> str:
    """A row's numbers as a column each, of a height from 0 to `most`."""
    heights = [round(8 * min(max(value / most, 0), 1)) for value in row.tolist()]
    return "".join("·▁▂▃▄▅▆▇█"[height] for height in heights)


Way = Callable[[torch.Tensor, RowParallelLinear, Slots], torch.Tensor]


def mixed_batch(backends: dict[str, tuple[Backend, Way]], dtype: torch.dtype, device: str) -> Iterator[str]:
    """What adapters add to each row of a mixed batch, drawn for each of several ways to compute it.

    backends   what the way is called -> a backend, and its `linear` or another method like it

    Adapter 4 adds n + 1 times a row's sum to column n, adapter 9 as much from the other end, and adapter 7 four times
    the sum to every column.
    """
    width, table, ids = 16, [9, 7, 4, None], (0, 4, 4, 9, 0, 7, 9, 4)
    rising = torch.arange(1, width + 1, dtype=dtype)[:, None]  # (width, 1)
    columns = {4: rising, 9: rising.flip(0), 7: torch.full_like(rising, 4)}
    sums = torch.tensor([1, 2, 4, 4, 3, 4, 2, 1], dtype=dtype, device=device)
    x = (sums[:, None] / width).expand(8, width).contiguous()
    drawn, values = [], []
    for backend, way in backends.values():
        base = RowParallelLinear(width, width, bias=False, params_dtype=dtype).to(device)
        base.weight.data = torch.zeros(width, width, dtype=dtype, device=device)
        slots = backend.place(Slots.empty(4, 2, [(width, width)], dtype, device), base)
        for slot, adapter_id in enumerate(table[:3]):
            pair = torch.ones(1, width, dtype=dtype), columns[adapter_id]
            slots.write(slot, [LoRALayerWeights("o_proj", 1, 1, *pair)])
        backend.begin_step(LoRAMapping(ids, ()), table)
        y = way(x, base, slots).cpu()
        drawn.append([bars(row, 64) for row in y])
        values.append([f"{value:g}" for value in y[:, 0].tolist()])
    yield f"what adapters add to {width} columns of each row: {', '.join(backends)}; slots hold {table}"
    for row, adapter_id in enumerate(ids):
        expected = f"{columns[adapter_id][0].item() * sums[row].item() if adapter_id else 0:g}"
        found = list(dict.fromkeys(value[row] for value in values))
        said = f"column 0: {', '.join(found)}" + ("" if found == [expected] else f", must be {expected}")
        slot = backend.token_lora_indices[row].item()
        yield f"  adapter {adapter_id} slot {slot:2}  {'  '.join(each[row] for each in drawn)}  {said}"


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def weights(name: str, rank: int, value: float = 1.0, height: int = H) -> LoRALayerWeights:
    """Of one module: A of ones, every element of B the value, no scaling left."""
    return LoRALayerWeights(name, rank, rank, ones(rank, H), ones(height, rank, value=value))


def adapter(adapter_id: int, *modules: str, rank: int = 2) -> LoRAModel:
    return LoRAModel(adapter_id, rank, {name: weights(name, rank) for name in modules})


class SmallModel(nn.Module):
    """Fused q, k and v, and one output linear that two names share."""

    supports_lora = True
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(H, H, 1, 1, bias=False, params_dtype=torch.float64)
        self.o_proj = RowParallelLinear(H, H, bias=False, params_dtype=torch.float64)
        self.o_proj_again = self.o_proj


@contextmanager
def small_engine(**options: object) -> Iterator[tuple[LLMEngine, list[LoRARequest | None]]]:
    """An engine with seeded weights, and requests by adapter id: none for base, then three adapters."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        base.mkdir()
        (base / "config.json").write_text(json.dumps(CONFIG))
        requests = [None, *(_adapter_folder(Path(folder), i) for i in (1, 2, 3))]
        args = EngineArgs(model=str(base), **{**OPTIONS, **options})
        yield LLMEngine(args.create_engine_config(), None, warm_up=False), requests


def _adapter_folder(folder: Path, seed: int) -> LoRARequest:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.{name}.{side}.weight": torch.randn(shape, generator=generator)
        for name in (Q_PROJ, O_PROJ)
        for side, shape in (("lora_A", (4, 32)), ("lora_B", (32, 4)))
    }
    path = folder / f"adapter-{seed}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in (Q_PROJ, O_PROJ)]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter-{seed}", seed, str(path))
