"""What each phase's notebook asks readers to predict: a few counts, taken from whatever code is loaded.

`python -m labs.kit.measures 3` prints those of phase 3 as JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

Counts = dict[str, float]  # case -> count


@dataclass(frozen=True)
class Question:
    """What is asked of one case, and what counts all of them.

    unit   of the counts    why   how one comes to the right number, for whoever has guessed
    """

    text: str
    case: str
    unit: str
    count: Callable[[], Counts]
    why: str


def bytes_of_adapters() -> Counts:
    """MB of A and B of each demo adapter, read by `LoRAModel`."""
    import torch

    from labs.kit.regions import ROOT
    from minivllm.lora.lora_model import LoRAModel
    from minivllm.lora.peft_helper import PEFTHelper

    ends = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    found = {}
    for number, name in enumerate(("json", "sql", "bullets", "dates"), 1):
        folder = str(ROOT / "adapters" / name)
        lora = LoRAModel.from_local_checkpoint(
            folder, ends, PEFTHelper.from_local_dir(folder), lora_model_id=number, dtype=torch.float32
        )
        parts = lora.loras.values()
        found[name] = sum(part.lora_a.nbytes + part.lora_b.nbytes for part in parts) / 1e6
    return found


def bytes_of_slots() -> Counts:
    """KB that slots of rank 32 take beside the demo model's q, k and v of one block, in float32."""
    import torch

    from minivllm.lora.slots import Slots

    found = {}
    for number in (1, 2, 4, 8):
        slots = Slots.empty(number, 32, [(576, 576), (576, 192), (576, 192)], torch.float32, "cpu")
        found[f"{number} slots"] = sum(t.nbytes for t in (*slots.a, *slots.b)) / 1e3
    return found


def products_by_order() -> Counts:
    """Products that 24 tokens of three adapters take in a linear of one slice, by how they stand in the batch."""
    import torch

    from labs.kit.judges.counting import Products
    from minivllm.layers.linear import ReplicatedLinear
    from minivllm.lora.mapping import LoRAMapping
    from minivllm.lora.runs_backend import RunsBackend
    from minivllm.lora.slots import Slots

    orders = {
        "by adapter": [1] * 8 + [2] * 8 + [3] * 8,
        "runs of four": ([1] * 4 + [2] * 4 + [3] * 4) * 2,
        "in turns": [1, 2, 3] * 8,
    }
    found = {}
    for name, ids in orders.items():
        backend, slots = RunsBackend("cpu"), Slots.empty(3, 8, [(64, 64)], torch.float32, "cpu")
        slots.live_ranks = [[8, 8, 8]]
        backend.begin_step(LoRAMapping(tuple(ids), tuple(ids)), [1, 2, 3])
        with torch.no_grad(), Products() as products:
            backend.linear(torch.ones(24, 64), ReplicatedLinear(64, 64, bias=False), slots)
        found[name] = products.count
    return found


def bytes_of_shrink() -> Counts:
    """KB that the shrink kernel loads and stores for 16 tokens, by how many adapters they have; R = 16, K = 256."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from labs.kit.judges.counting import kernel_bytes
    from minivllm.gpu.sgmv import LoRAKernelMeta, shrink

    found = {}
    for adapters in (1, 2, 4, 8):
        meta = LoRAKernelMeta.make(max_loras=8, max_num_tokens=16, device="cpu")
        meta.prepare_tensors(torch.arange(16) % adapters)
        with kernel_bytes() as moved:
            shrink(torch.ones(16, 256), [torch.ones(8, 16, 256)], meta.meta_args(16), splits=1)
        found[f"{adapters} adapter" + "s" * (adapters > 1)] = sum(moved) / 1e3
    return found


def misses_in_turns() -> Counts:
    """Misses of 120 requests that go round a few adapters in turn, with four places."""
    from minivllm.lora.lru_cache import LRUCache

    found = {}
    for adapters in (2, 3, 4, 5):
        cache, misses = LRUCache(4), 0
        for request in range(120):
            adapter = request % adapters
            if adapter in cache:
                cache.touch(adapter)
            else:
                misses += 1
                cache.put(adapter, "weights")
        found[f"{adapters} adapters"] = misses
    return found


def waits_by_bound() -> Counts:
    """Steps until the first token of a request whose adapter finds both slots taken by long answers, by the bound."""
    from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
    from minivllm.core.request import Request
    from minivllm.core.scheduler import Scheduler
    from minivllm.lora.request import LoRARequest
    from minivllm.sampling_params import SamplingParams

    found = {}
    for bound in (2, 4, 8, 16):
        scheduler = Scheduler(
            SchedulerConfig(8, 64, bound),
            CacheConfig(num_blocks=100),
            LoRAConfig(max_loras=2),
            adapter_identity=int,
        )
        steps = 0
        for number in (1, 2, 3):
            params = SamplingParams(max_tokens=40, temperature=0)
            lora = LoRARequest(f"adapter {number}", number, f"/nowhere/{number}")
            scheduler.add_request(Request(str(number), [5] * 4, params, lora))
        while "3" in scheduler.requests and not scheduler.requests["3"].num_output_tokens:
            output = scheduler.schedule()
            sampled = {s.request.request_id: [7] for s in output.scheduled if s.samples}
            scheduler.update_from_output(output, sampled)
            steps += 1
        found[f"bound {bound}"] = steps
    return found


def runs_of_a_batch() -> Counts:
    """Runs that a linear meets in a step of twelve decoding requests that came in turns, by how many adapters."""
    from minivllm.core.output import ScheduledRequest, SchedulerOutput
    from minivllm.core.request import Request
    from minivllm.lora.mapping import compute_runs
    from minivllm.lora.request import LoRARequest
    from minivllm.sampling_params import SamplingParams
    from minivllm.worker.input_batch import InputBatch

    found = {}
    for adapters in (1, 2, 3, 6):
        loras = [LoRARequest(f"adapter {n}", n, f"/nowhere/{n}") for n in range(1, adapters + 1)]
        requests = [Request(str(n), [5], SamplingParams(), loras[n % adapters]) for n in range(12)]
        output = SchedulerOutput(scheduled=[ScheduledRequest(r, 1, True) for r in requests], running=requests)
        batch = InputBatch.from_scheduler_output(output)
        _, ids, _ = batch.make_lora_inputs(batch.num_scheduled_tokens, batch.num_sampled_tokens)
        found[f"{adapters} adapter" + "s" * (adapters > 1)] = len(compute_runs(list(ids)))
    return found


QUESTIONS = {
    "1": Question(
        "How many MB (1,000,000 bytes) are A and B of `sql` in memory, in float32?",
        "sql",
        "MB",
        bytes_of_adapters,
        "A pair has rank · (inputs + outputs) numbers. The seven linears of a block have 576 + 576, twice 576 + 192, "
        "576 + 576 and three times 576 + 1536: 10,176 together, times rank 16, 30 blocks and 4 bytes.",
    ),
    "2": Question(
        "A linear has three slices, 576 wide, with 576, 192 and 192 outputs. How many KB (1,000 bytes) do 4 slots of "
        "rank 32 take, in float32?",
        "4 slots",
        "KB",
        bytes_of_slots,
        "Each slice has an A of its own, as wide as the input, and a B as high as its outputs. Every slot has room for "
        "the largest rank: 4 · 32 · (3 · 576 + 576 + 192 + 192) numbers of 4 bytes.",
    ),
    "3": Question(
        "24 tokens of three adapters come in turns: 1, 2, 3, 1, 2, 3, ... How many matrix products does the backend by "
        "runs need for one linear of one slice, such as o_proj, that of the base among them?",
        "in turns",
        "products",
        products_by_order,
        "No two neighbours share an adapter, so each token is a run of its own, with a product by A and one by B: "
        "2 · 24, and one product of the base for all rows.",
    ),
    "4": Question(
        "16 tokens of one adapter have the shrink kernel load and store some KB (1,000 bytes); R = 16, K = 256, all in "
        "float32. How many KB are they with 8 adapters?",
        "8 adapters",
        "KB",
        bytes_of_shrink,
        "x and h are moved once, and A once for each adapter: 16 · 256 + 8 · 16 · 256 + 16 · 16 numbers of 4 bytes, "
        "and a few bytes more that say which rows a tile has.",
    ),
    "5": Question(
        "Four places, least recently used out. 120 requests go round 5 adapters in turn. How many miss?",
        "5 adapters",
        "misses",
        misses_in_turns,
        "The adapter that comes next is always the one that was used longest ago, and it was thrown out for the "
        "request just before.",
    ),
    "6": Question(
        "Two slots are taken by answers of 40 tokens when a third adapter's request comes in the same step. The bound "
        "is 8 steps. How many steps until its first token?",
        "bound 8",
        "steps",
        waits_by_bound,
        "The third adapter is passed over in 8 steps. In the ninth it is due: a running request makes way, and the "
        "prompt is computed in the same step.",
    ),
    "7": Question(
        "Twelve requests of three adapters came in turns: 1, 2, 3, 1, 2, 3, ... How many runs does a linear meet in "
        "a step in which all decode?",
        "3 adapters",
        "runs",
        runs_of_a_batch,
        "The rows of a batch are ordered by adapter before they are computed, so all rows of an adapter stand together "
        "and are one run.",
    ),
}


if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[1]].count()))
