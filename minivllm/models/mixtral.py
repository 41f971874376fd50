"""Mixtral. Stands for vllm/model_executor/models/mixtral.py (v0.22.1)."""

from typing import ClassVar

from minivllm.models.interfaces import WeightsMapper
from minivllm.models.llama import LlamaForCausalLM


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama with experts in every layer (vLLM: MixtralForCausalLM)."""

    expert_params_mapping: ClassVar = ("w1", "w2", "w3")
    # Checkpoints and old adapters keep the block's first name; transformers 5 calls it `mlp`, as we do.
    hf_to_vllm_mapper: ClassVar = WeightsMapper(orig_to_new_substr={".block_sparse_moe.": ".mlp."})
    supports_cuda_graphs: ClassVar = False
