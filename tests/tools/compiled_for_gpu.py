"""Compiles what an exercise's Triton kernel is for an H100, where no GPU is. Nothing is launched.

    python -m tests.tools.compiled_for_gpu shrink|expand FILE
    python -m tests.tools.compiled_for_gpu sum
    python -m tests.tools.compiled_for_gpu readers
    python -m tests.tools.compiled_for_gpu rotary

FILE holds the module's text. Triton's interpreter takes more of Python than its compiler: this is who would tell.
A process of its own, because an interpreter that was chosen stays.
"""

import importlib.util
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.worlds.gpu import in_pages


class H100:
    """What Triton asks a GPU before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self):
        return torch.cpu


def module_of(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_all(what, path):
    """The kernel as it is launched: for both dtypes, for ranks that fill their blocks and ranks that do not."""
    from minivllm.gpu.sgmv import LoRAKernelMeta

    module = module_of(f"minivllm.gpu.sgmv.lora_{what}_op", path)
    meta = LoRAKernelMeta.make(3, 40, "cpu")
    meta.prepare_tensors(torch.arange(40) % 4 - 1)
    tiles, ranks = meta.meta_args(40), torch.ones(2, 3, dtype=torch.int32)
    for dtype, rank in ((torch.bfloat16, 16), (torch.float32, 20)):
        a = [torch.zeros(3, rank, 160, dtype=dtype) for _ in range(2)]
        b = [torch.zeros(3, width, rank, dtype=dtype) for width in (48, 24)]
        x, y, h = (
            torch.zeros(40, 160, dtype=dtype),
            torch.zeros(40, 72, dtype=dtype),
            torch.zeros(2, 2, 40, rank),
        )
        module.shrink(x, a, tiles, ranks, h=h) if what == "shrink" else module.expand(h, b, y, tiles, ranks)


def compile_sums():
    """And gathers, and norms, with adapters, too: as a rank of two and of eight launches them, for all dtypes."""
    from minivllm.gpu.kernels.update import Update
    from minivllm.parallel.peers.exchange import Exchange
    from minivllm.parallel.peers.gather_op import peer_gather
    from minivllm.parallel.peers.group import DTYPES
    from minivllm.parallel.peers.norm_op import peer_norm
    from minivllm.parallel.peers.sum_op import peer_sum

    slots = torch.zeros(32, dtype=torch.int64)
    for dtype in DTYPES:
        for size in (2, 8):
            turns = torch.zeros(256, dtype=torch.int32)
            exchange = Exchange(torch.zeros(size, dtype=torch.int64), turns, turns[:1], 1)
            peer_sum(torch.zeros(32, 4096, dtype=dtype), exchange)
            peer_gather(torch.zeros(32, 3, 8, dtype=dtype), exchange)
            for width in (1000, 4096):
                x = torch.zeros(32, width, dtype=dtype)
                peer_norm(x, x, x[0], 1e-5, exchange)
                for rank in (8, 32):
                    b, ranks = torch.zeros(3, width, rank, dtype=dtype), torch.ones(1, 3, dtype=torch.int32)
                    update = Update(torch.zeros(1, 32, rank, dtype=dtype), in_pages([b], ranks))
                    peer_norm(x, x, x[0], 1e-5, exchange, update, slots)


def compile_rotations():
    """What adds adapters to q, k and v. Steps of few tokens, or of many, share a variant."""
    from minivllm.gpu.kernels import adapted_rotary_op as rotary
    from minivllm.gpu.kernels.update import Update
    from minivllm.gpu.sgmv import LoRAKernelMeta

    rotary.can_overlap = lambda device: True
    heads, kv_heads, size, slots = 6, 2, 80, 3
    parts = heads * size, kv_heads * size, kv_heads * size
    meta = LoRAKernelMeta.make(slots, 2000, "cpu")
    expected = 0
    for dtype, rank, heights in (
        (torch.bfloat16, 16, parts),
        (torch.bfloat16, 72, parts),
        (torch.float32, 20, parts),
        (torch.bfloat16, 16, (sum(parts),)),
    ):
        n, b = len(heights), [torch.zeros(slots, height, rank, dtype=dtype) for height in heights]
        pieces = in_pages(b, torch.ones(n, slots, dtype=torch.int32))
        for sizes in ((1, 17, 512), (513, 600, 2000)):
            for tokens in sizes:
                meta.prepare_tensors(torch.arange(tokens) % 4 - 1)
                h = torch.zeros(n, tokens, rank, dtype=dtype)
                y = torch.zeros(tokens, sum(parts), dtype=dtype)
                angles, mapping = torch.zeros(tokens, 1, size), torch.zeros(tokens, dtype=torch.int64)
                cache = torch.zeros(4, 16, 2 * kv_heads, size, dtype=dtype)
                places = y.unflatten(1, (-1, size)), angles, angles, mapping, cache
                rotary.adapted_rotary(Update(h, pieces), *places, meta.meta_args(tokens))
            expected += 1
            made = len(rotary._adapted_rotary_kernel.device_caches[0][0])
            assert made == expected, f"{made - expected + 1} variants for {sizes} tokens"


def compile_readers():
    """Norms and activations that add what adapters add, and the expand. All short steps share a variant."""
    from minivllm.gpu.kernels import adapted_norm_op, adapted_silu_op, paged_expand_op
    from minivllm.gpu.kernels.update import Update
    from minivllm.gpu.sgmv import LoRAKernelMeta

    for module in (adapted_norm_op, adapted_silu_op, paged_expand_op):
        module.can_overlap = lambda device: True
    width, slots = 4096, 3
    meta = LoRAKernelMeta.make(slots, 128, "cpu")
    of_16_bits = [(torch.bfloat16, rank) for rank in (16, 32, 128)]
    for expected, (dtype, rank) in enumerate([*of_16_bits, (torch.float32, 12)], 1):
        b = [torch.zeros(slots, width, rank, dtype=dtype) for _ in range(2)]
        pieces = in_pages(b, torch.ones(2, slots, dtype=torch.int32))
        for tokens in (1, 17, 40, 128):
            meta.prepare_tensors(torch.arange(tokens) % 4 - 1)
            tiles, h = meta.meta_args(tokens), torch.zeros(2, tokens, rank, dtype=dtype)
            y, of_slots = torch.zeros(tokens, 2 * width, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
            first, x = Update(h[:1], pieces.of(slice(1))), y[:, :width]
            adapted_norm_op.adapted_norm(first, of_slots, x[0], 1e-5, x, x)
            adapted_silu_op.adapted_silu(Update(h, pieces), y, tiles)
            paged_expand_op.paged_expand(h, pieces, y, tiles)
        for kernel in (
            adapted_norm_op._adapted_norm_kernel,
            adapted_silu_op._adapted_silu_kernel,
            paged_expand_op._paged_expand_kernel,
        ):
            made = len(kernel.device_caches[0][0])
            assert made == expected, f"{made - expected + 1} variants of {kernel.__name__}, rank {rank}"


def in_a_sentence(error):
    """What is wrong with which line of the kernel. Functions that it calls say it first."""
    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    line = error.src.split("\n")[error.node.lineno - 1].strip()
    return f"{error.error_message or error.__cause__}, at: {line}"


if __name__ == "__main__":
    driver.set_active(H100())
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: run(self, *args, **{**kwargs, "warmup": True})
    try:
        given = {("sum",): compile_sums, ("readers",): compile_readers, ("rotary",): compile_rotations}
        given = given.get(tuple(sys.argv[1:]))
        given() if given else compile_all(*sys.argv[1:])
    except CompilationError as error:
        sys.exit(in_a_sentence(error))
    print("compiled")
