"""From a model folder to a model that runs. Stands for vllm/model_executor/models/registry.py (v0.22.1)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.linear import LinearBase, Product
from minivllm.layers.norm import RMSNorm
from minivllm.layers.quantization import quantize_linears
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.models.config import ModelArchitecture
from minivllm.models.llama import LlamaForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM
from minivllm.models.loader import initialize_dummy_weights, load_weights

MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def get_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    pack: bool = True,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
    tp: Ranks = ONE_RANK,
    product: Product = F.linear,
) -> nn.Module:
    """Build the model a Hugging Face folder describes, and load its weights (vLLM: get_model).

    dtype: None keeps the checkpoint's. pack: prepare linears and norms for float32 on a CPU.
    load_format: "dummy" reads no weights but draws them by `seed`.
    quantization: as ModelConfig has it.
    tp: which part of every layer this process has.
    product: how linears compute.
    Raises FileNotFoundError and ValueError as ModelArchitecture.from_folder and load_weights do.
    """
    config = ModelArchitecture.from_folder(folder)
    # Full weights that are to be quantized wait on the CPU: a GPU need not have room for them.
    first_device = "cpu" if quantization and load_format == "auto" else device
    model = MODELS[config.architecture](config, dtype, first_device, tp, product)
    if load_format == "dummy":
        initialize_dummy_weights(model, seed)
    else:
        load_weights(model, folder)
    if quantization:
        quantize_linears(model, device)
    if pack and product is F.linear:
        for module in model.modules():
            if isinstance(module, LinearBase | RMSNorm):
                module.pack()
    return model.eval()
