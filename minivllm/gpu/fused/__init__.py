"""Blocks of a model whose forward pass launches fused kernels, around a model that is loaded and wrapped for LoRA.

Kernels that also add what adapters add give 4 % more tokens a second on an H100 with 8 adapters, and 10 % on two GPUs,
where norms sum over ranks, too (benchmarks/README.md). vLLM has torch.compile fuse operators (vllm/compilation).
"""

from minivllm.gpu.fused.blocks import FusedLlamaModel
from minivllm.gpu.fused.layers import FusedRMSNorm, FusedSiluAndMul
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.norm import RMSNorm
from minivllm.lora.wrapping import replace_submodule
from minivllm.models.llama import LlamaForCausalLM


def fuse(model: LlamaForCausalLM, layer_kernels: bool | None = None) -> LlamaForCausalLM:
    """Put fused blocks in the places of a model's own, and give the model back. All modules keep their names.

    layer_kernels   whether norms and activations become kernels, too, which compute in float32; None = where the model
                    is on a GPU
    """
    if model.model.norm.weight.is_cuda if layer_kernels is None else layer_kernels:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, RMSNorm):
                replace_submodule(model, name, FusedRMSNorm(layer))
            elif isinstance(layer, SiluAndMul):
                replace_submodule(model, name, FusedSiluAndMul())
    replace_submodule(model, "model", FusedLlamaModel(model.model, model.tp))
    return model
