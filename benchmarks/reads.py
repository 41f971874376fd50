"""`python -m benchmarks.reads`: how fast adapters come from disk, by how many are read at a time. See README.md."""

import json
import os
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import reads_beside
from benchmarks.arguments import SHAPES, each_once, run_as_command, whole
from benchmarks.report import Report, default_path
from minivllm.assembly import LLMEngine
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.engine_args import EngineArgs
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.worker.cpu_threads import set_num_threads

NAME = "python -m benchmarks.reads"
LAYERS = 8


class Memory:
    """Parts of memory that an adapter is moved to when it has been read, as `SlotWriter.stage` does it.

    is_kept   parts are touched already and come back; False: each is new
    """

    def __init__(self, nbytes: int, count: int, is_kept: bool) -> None:
        self.nbytes, self.is_kept = nbytes, is_kept
        self.free = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count if is_kept else 0)]

    def move_in(self, lora: LoRAModel) -> None:
        part = self.free.pop() if self.is_kept else torch.empty(self.nbytes, dtype=torch.uint8)
        used = 0
        for weights in lora.loras.values():
            for tensor in weights.tensors:
                part[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                used += tensor.nbytes
        if self.is_kept:
            self.free.append(part)


def write_files(folder: Path, adapters: int, rank: int) -> tuple[str, list[LoRARequest]]:
    """A model of few layers of an 8B model's width, and as many adapter files with numbers of their own."""
    model = folder / "model"
    model.mkdir()
    shape = json.loads((SHAPES / "llama-8b" / "config.json").read_text())
    small = {"num_hidden_layers": LAYERS, "vocab_size": 1024}
    (model / "config.json").write_text(json.dumps(shape | small))
    for number in range(adapters):
        save_random_adapter(folder / str(number), str(model), rank, seed=number, dtype=torch.bfloat16)
    os.sync()
    return str(model), [LoRARequest(str(n), n + 1, str(folder / str(n))) for n in range(adapters)]


def source_of(model: str, rank: int) -> AdapterSource:
    """What an engine reads adapters by."""
    args = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="bfloat16",
        threads=1,
        max_model_len=512,
        num_kv_blocks=64,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=rank,
        warm_up=False,
    )
    return LLMEngine.from_engine_args(args).adapters.worker.source


def bring_in_or_out(requests: Sequence[LoRARequest], is_cold: bool) -> None:
    """Have the system's page cache hold the files, or none of them."""
    for request in requests:
        with open(Path(request.lora_path, "adapter_model.safetensors"), "rb") as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(2**24):
                    pass


def read_all(
    source: AdapterSource, requests: Sequence[LoRARequest], memory: Memory, threads: int
) -> dict[str, float]:
    """Read all, so many at a time, each on one thread."""

    def read(request: LoRARequest) -> tuple[float, float]:
        started = time.perf_counter()
        lora = source.load(request)
        read_at = time.perf_counter()
        memory.move_in(lora)
        return read_at - started, time.perf_counter() - read_at

    started, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads, initializer=partial(set_num_threads, 1)) as pool:
        seconds = list(pool.map(read, requests))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    loads, moves = ([1e3 * each for each in column] for column in zip(*seconds))
    return {
        "adapters_per_second": len(requests) / elapsed,
        "cpu_ms": 1e3 * cpu / len(requests),
        "load_p50_ms": statistics.median(loads),
        "load_max_ms": max(loads),
        "move_p50_ms": statistics.median(moves),
        "move_max_ms": max(moves),
    }


def run(options: Namespace, result: Report, folder: Path) -> None:
    """A row for files in the page cache and on disk, memory kept and new, and each number of threads: medians."""
    model, requests = write_files(folder, options.adapters, options.rank)
    source = source_of(model, options.rank)
    nbytes = os.path.getsize(Path(requests[0].lora_path, "adapter_model.safetensors"))
    found: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for is_cold in (False, True):
            for is_kept in (True, False):
                for threads in options.threads:
                    memory = Memory(nbytes, threads, is_kept)
                    bring_in_or_out(requests, is_cold)
                    case = "disk" if is_cold else "page cache", "kept" if is_kept else "new", threads
                    found.setdefault(case, []).append(read_all(source, requests, memory, threads))
    for (files, memory, threads), rounds in found.items():
        medians: dict[str, Any] = {
            name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]
        }
        result.add({"files": files, "memory": memory, "threads": threads, "mb": nbytes // 10**6, **medians})


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--threads", type=each_once(whole()), default=[1, 2, 4], help="adapters at a time")
    parser.add_argument("--adapters", type=whole(), default=8)
    parser.add_argument("--rank", type=whole(), default=64, help="64 on 8 layers is as much as 16 on 32")
    parser.add_argument("--rounds", type=whole(), default=5, help="medians are reported")
    parser.add_argument(
        "--beside", action="store_true", help="what a read costs beside a thread that runs steps"
    )
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    options = parser.parse_args(arguments)
    kept = {key: value for key, value in vars(options).items() if key not in ("threads", "json", "beside")}
    if options.beside:
        kept["rank"] = ",".join(map(str, reads_beside.RANKS))
    name = "reads-beside" if options.beside else "reads"
    result = Report(options.json or default_path(name, "cpu"), name, kept, "cpu")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if options.beside else None) as folder:
        (reads_beside.run if options.beside else run)(options, result, Path(folder))


if __name__ == "__main__":
    run_as_command(NAME, main)
