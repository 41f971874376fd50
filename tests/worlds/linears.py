"""A model of linears only, with every kind of them, and random adapters for its modules."""

import torch
from torch import nn

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.wrapping import WrappedModules

DTYPE = torch.float64
HIDDEN = 12
# What a checkpoint calls the linears of one layer: input width, output width.
CHECKPOINT_SHAPES = {
    "attn.q_proj": (HIDDEN, 16),
    "attn.k_proj": (HIDDEN, 8),
    "attn.v_proj": (HIDDEN, 8),
    "attn.o_proj": (16, HIDDEN),
    "mlp.gate_proj": (HIDDEN, 10),
    "mlp.up_proj": (HIDDEN, 10),
    "mlp.down_proj": (10, HIDDEN),
    "router": (HIDDEN, 3),
    "adaptor": (HIDDEN, 5),
}
FUSED = {"attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "router", "adaptor"}


class ToyLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv_proj = QKVParallelLinear(HIDDEN, 4, 4, 2, params_dtype=DTYPE)
        self.attn.o_proj = RowParallelLinear(16, HIDDEN, params_dtype=DTYPE)
        self.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [10, 10], params_dtype=DTYPE)
        self.mlp.down_proj = RowParallelLinear(10, HIDDEN, params_dtype=DTYPE)
        self.router = ReplicatedLinear(HIDDEN, 3, params_dtype=DTYPE)
        self.adaptor = ColumnParallelLinear(HIDDEN, 5, bias=False, params_dtype=DTYPE)


class ToyModel(nn.Module):
    supports_lora = True
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, num_layers=2, seed=0):
        super().__init__()
        self.layers = nn.ModuleList(ToyLayer() for _ in range(num_layers))
        self.lm_head = ParallelLMHead(11, HIDDEN, params_dtype=DTYPE)
        randomize(self, seed)


class SharingModel(ToyModel):
    """The second layer's MLP is the first's, and a router is also known as somebody's gate."""

    def __init__(self):
        super().__init__(num_layers=2)
        self.layers[1].mlp = self.layers[0].mlp
        self.layers[1].runner = nn.Module()
        self.layers[1].runner.gate = self.layers[1].router


def randomize(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def wrap(model, punica, **lora_config):
    config = {"max_lora_rank": 8, "max_loras": 3, **lora_config}
    return WrappedModules(model, LoRAConfig(**config), punica, LORA_EXTENSIONS)


def targets_of(wrapped):
    """Every name that adapters may use for a slice -> (module name, slice)."""
    layers = wrapped.modules.values()
    return {target: (wrapped.claims[target], i) for layer in layers for target, i in layer.targets.items()}


def random_pair(width, rank, output, seed, dtype=DTYPE):
    """A (r, K) and B (N, r), no two elements alike."""
    generator = torch.Generator().manual_seed(seed)
    lora_a = torch.randn(rank, width, dtype=torch.float64, generator=generator)
    lora_b = torch.randn(output, rank, dtype=torch.float64, generator=generator)
    return lora_a.to(dtype), lora_b.to(dtype)


def toy_adapter(seed, modules=None, rank=3, alpha=6.0, adapter_id=1):
    """Random weights for the named modules of a ToyModel's first layer (all of them by default)."""
    loras = {}
    for i, module in enumerate(modules or CHECKPOINT_SHAPES):
        width, output = CHECKPOINT_SHAPES[module]
        name = f"layers.0.{module}"
        lora_a, lora_b = random_pair(width, rank, output, seed=100 * seed + i)
        loras[name] = LoRALayerWeights(name, rank, alpha, lora_a, lora_b)
    return LoRAModel(adapter_id, rank, loras)
