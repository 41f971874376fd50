"""What processes cannot share, refused before any is started. Stands for parts of vllm/config/model.py (v0.22.1)."""

from dataclasses import replace
from typing import Any

import torch

from minivllm.models.config import ModelArchitecture
from minivllm.parallel.tensor_parallel import TensorParallel


def refuse_uneven_shares(model: ModelArchitecture, size: int) -> None:
    """ValueError unless so many processes have equal shares of a model. It names what it is, and how many have."""
    if (problem := _uneven(model, size)) is None:
        return
    fits = next(s for s in range(min(size, model.num_attention_heads), 0, -1) if _uneven(model, s) is None)
    raise ValueError(f"{problem}; pass --tensor-parallel-size {fits}")


def _uneven(model: ModelArchitecture, size: int) -> str | None:
    """What so many processes cannot share out equally, None = all can be."""
    try:
        _share_out(model, TensorParallel(0, size))
    except ValueError as error:
        return str(error).partition(";")[0]  # the size that this one thing wants may not do for others
    return None


def _share_out(model: ModelArchitecture, tp: TensorParallel) -> None:
    tp.share(model.num_attention_heads, "num_attention_heads")
    tp.kv_heads(model.num_key_value_heads)
    if len(model.sparse_layers) < model.num_hidden_layers:
        tp.share(model.intermediate_size, "intermediate_size")
    tp.share(model.moe_intermediate_size, "moe_intermediate_size")


def between_a_and_b(lora_config: Any, size: int, device: torch.device | str, page_ranks: int) -> Any:
    """The same LoRAConfig with a backend that uses A and B apart, where processes share out both.

    ValueError if "paged" was asked for, and processes cannot share out the ranks of each page.
    """
    if size == 1 or not lora_config.fully_sharded_loras:
        return lora_config
    rank = lora_config.max_lora_rank
    if lora_config.punica_backend == "paged" and (page_ranks % size or rank % page_ranks):
        raise ValueError(
            f"punica_backend 'paged' has {page_ranks} ranks in a page, which processes share out with "
            f"fully_sharded_loras: tensor_parallel_size {size} must divide them, and they max_lora_rank {rank}; use "
            "auto or triton"
        )
    if lora_config.punica_backend == "auto" and torch.device(device).type == "cuda":
        return replace(lora_config, punica_backend="triton")
    return lora_config
