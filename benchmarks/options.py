"""Options that every engine benchmark takes, and the engine that they describe."""

import gc
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from minivllm.engine.arg_utils import EngineArgs

SHAPES = Path(__file__).resolve().parent / "shapes"
BLOCK_SIZE = 16


def add_engine_options(parser: ArgumentParser) -> None:
    names = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--model", default="llama-8b", help=f"{names}, or a folder; weights are random")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters and of the slots")
    parser.add_argument("--punica-backend", default="auto")
    parser.add_argument(
        "--target-modules",
        type=lambda names: names.split(","),
        help="what to wrap; all that can be if not given",
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    parser.add_argument("--plot", type=Path, help="picture; beside the result file if not given")


def model_folder(name: str) -> str:
    """The folder of a shape by its name; anything else is a folder already."""
    return str(SHAPES / name) if (SHAPES / name / "config.json").is_file() else name


def engine_args(
    options: Namespace, max_num_seqs: int, longest: int, slots: int, cpu_loras: int | None = None
) -> EngineArgs:
    """An engine of random weights with KV blocks for `max_num_seqs` requests of `longest` tokens each.

    slots       0 = LoRA off
    cpu_loras   adapters in memory; None = as many as slots
    """
    lora = {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": options.rank,
        "max_cpu_loras": cpu_loras,
        "punica_backend": options.punica_backend,
        "target_modules": options.target_modules,
    }
    return EngineArgs(
        model=options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max_num_seqs * -(-longest // BLOCK_SIZE) + 1,  # block 0 is never handed out
        enable_prefix_caching=False,
        **(lora if slots else {}),
    )


def free_memory() -> None:
    """Give an engine's memory back to the device, once nothing refers to the engine any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
