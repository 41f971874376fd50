"""The engine that a benchmark's options describe."""

import gc
from argparse import Namespace

import torch

from benchmarks.arguments import SHAPES
from minivllm.engine_args import EngineArgs

BLOCK_SIZE = 16


def model_folder(name: str) -> str:
    """The folder of a shape by its name; anything else is a folder already."""
    return str(SHAPES / name) if (SHAPES / name / "config.json").is_file() else name


def engine_args(
    options: Namespace, max_num_seqs: int, longest: int, slots: int | None, cpu_loras: int | None = None
) -> EngineArgs:
    """An engine of random weights with KV blocks for `max_num_seqs` requests of `longest` tokens each.

    slots       0 = LoRA off; None = as many as memory and demand ask for
    cpu_loras   adapters in memory; None = as many as slots
    """
    lora = {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": options.rank,
        "max_cpu_loras": cpu_loras,
        "enable_dora": options.enable_dora,
        "punica_backend": options.punica_backend,
        "target_modules": options.target_modules,
        "fully_sharded_loras": options.fully_sharded_loras,
    }
    return EngineArgs(
        model=options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        batch_invariant=options.batch_invariant,
        tensor_parallel_size=options.tensor_parallel_size,
        disable_custom_all_reduce=options.disable_custom_all_reduce,
        max_model_len=options.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max_num_seqs * -(-longest // BLOCK_SIZE) + 1,  # block 0 is never handed out
        enable_prefix_caching=False,
        **({} if slots == 0 else lora),
    )


def free_memory() -> None:
    """Give an engine's memory back to the device, once nothing refers to the engine any more."""
    gc.unfreeze()  # what `avoid_pauses` froze
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
