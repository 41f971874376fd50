"""Qwen3 with experts. Stands for vllm/model_executor/models/qwen3_moe.py (v0.22.1)."""

from typing import ClassVar

from minivllm.models.llama import LlamaForCausalLM


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 with experts in some layers, or in all (vLLM: Qwen3MoeForCausalLM)."""

    expert_params_mapping: ClassVar = ("gate_proj", "down_proj", "up_proj")
    supports_cuda_graphs: ClassVar = False
