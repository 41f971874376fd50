"""Two processes, on paper: what each has of an adapter, of h, of a vocabulary, and what it hears of a step."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from labs.demos.small import numbers, ones
from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.options.fully_sharded import _ShardedColumn
from minivllm.parallel.adapter_share import share_of_linear
from minivllm.parallel.step_messages import StepReader, StepWriter
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.sampling_params import SamplingParams

SIZE = 2


def processes() -> list[TensorParallel]:
    return [TensorParallel(rank, SIZE) for rank in range(SIZE)]


def demo_11_1() -> Iterator[str]:
    yield "one adapter for gate (rows 0 to 3) and up (rows 4 to 9), and one for a row-parallel linear of 4 inputs"
    fused = LoRALayerWeights("gate_up_proj", 1, 1, ones(1, 4), torch.arange(10.0)[:, None])
    down = LoRALayerWeights("down_proj", 1, 1, torch.arange(4.0)[None], ones(2, 1))
    for tp in processes():
        linears: list[LinearBase] = [
            MergedColumnParallelLinear(4, [4, 6], tp=tp),
            RowParallelLinear(4, 2, tp=tp),
        ]
        (own,), (own_down,) = (share_of_linear(x, 1).of([w]) for x, w in zip(linears, (fused, down)))
        yield f"process {tp.rank}, first: rows {numbers(own.lora_b[:, 0])} of B, {own.lora_a.shape[1]} columns of A"
        yield f"process {tp.rank}, second: columns {numbers(own_down.lora_a[0])} of A, {len(own_down.lora_b)} rows of B"


def demo_11_2() -> Iterator[str]:
    yield "each process has one of two ranks: h is [3 5], of which process 0 computes 3 and process 1 computes 5"
    expanded: list[str] = []

    def gather(h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h, h + 2], dim=-1)  # what process 1 has

    def expand(y: torch.Tensor, h: torch.Tensor, backend: object, rows: object) -> None:
        expanded.extend(numbers(own) for own in h.unbind(1))

    layer = SimpleNamespace(
        tp=SimpleNamespace(all_gather=gather, all_reduce=lambda h: 2 * h + 2),
        slots=SimpleNamespace(shrink=lambda x, backend: ones(1, 2, 1, value=3), expand=expand),
        backend=SimpleNamespace(token_rows=lambda tokens: None),
        max_rank=2,
    )
    _ShardedColumn._add(layer, ones(1, 4), ones(1, 4))
    yield f"B of q is applied to {expanded[0]}, B of v to {expanded[1]}"


def demo_11_3() -> Iterator[str]:
    table = torch.tensor([10.0, 11, 12, 13, 14])[:, None]
    yield "five tokens, two processes: three rows each"
    ids = torch.tensor([4, 0, 2, 3])
    for tp in processes():
        own = tp.own_tokens(table)
        found = tp.look_up_own(ids, own)
        yield f"process {tp.rank} has {numbers(own[:, 0])}, and for tokens 4 0 2 3 it gives {numbers(found[:, 0])}"
    for tp in processes():
        slots = torch.tensor([[7.0, 8, 9, 50], [4, 5, 0, 50]])[tp.rank][None, :, None]
        found = tp.look_up_own_in(torch.tensor([5, 1, 4]), slots, torch.zeros(3, dtype=torch.long), 5)
        yield f"process {tp.rank}, of an adapter that adds token 5, for tokens 5 1 4: {numbers(found[:, 0])}"


def demo_11_4() -> Iterator[str]:
    writer, reader = StepWriter(), StepReader()
    request = Request("r", list(range(100, 132)), SamplingParams(), None)
    request.block_ids = [4, 9]

    def step(tokens: int) -> str:
        rows = [ScheduledRequest(request, tokens, True)]
        message = writer.write(SchedulerOutput(rows, [request], total_num_scheduled_tokens=tokens))
        (row,) = reader.read(pickle.loads(pickle.dumps(message))).running
        return f"{len(message.token_ids[0])} tokens and blocks {message.new_blocks[0]} travel; it has {row.block_ids}"

    yield f"a prompt of 32 tokens: {step(32)}"
    request.num_computed_tokens = 32
    request.append_output_token(7)
    request.block_ids.append(6)
    yield f"a token more: {step(1)}"
    yield f"the same once more: {step(1)}"
    request.block_ids = [2, 3, 1]
    yield f"preempted, with other blocks: {step(1)}"
