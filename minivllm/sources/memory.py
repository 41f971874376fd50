"""Adapters whose tensors a request brings. vLLM (v0.22.1) has none; trainers patch `_load_adapter` of
vllm/lora/worker_manager.py, and give requests the two fields that are read here."""

from typing import Any

from minivllm.config import LoRAConfig
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest


def read_tensors(
    lora_request: LoRARequest,
    lora_config: LoRAConfig,
    max_position_embeddings: int | None,
    extensions: LoRAExtensions,
    shapes_only: bool,
    most_tensors: int,
    **options: Any,
) -> LoRAModel:
    """As `LoRAModel.from_local_checkpoint`, from copies of the request's tensors: a trainer may write to them later.

    The engine keeps the request while it knows the adapter, and reads the tensors again after an eviction.
    ValueError for fields that are no dicts, and as for a folder.
    """
    config, tensors = lora_request.peft_config, lora_request.lora_tensors
    if not isinstance(config, dict) or not isinstance(tensors, dict):
        raise ValueError(
            "lora_tensors and peft_config must be dicts: tensors by PEFT's names, and its fields"
        )
    if len(tensors) > most_tensors:
        raise ValueError(f"lora_tensors has {len(tensors)} tensors, at most {most_tensors} are read")
    config = {**config, "vllm_max_position_embeddings": max_position_embeddings}
    peft_helper = PEFTHelper.from_dict(config, extensions)
    peft_helper.validate_legal(lora_config)
    device = "meta" if shapes_only else "cpu"
    copies = {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
    return LoRAModel.from_lora_tensors(lora_request.lora_int_id, copies, peft_helper, device, **options)
