"""Who runs in a step."""

from collections.abc import Iterator

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


def demo_6_1() -> Iterator[str]:
    admission = LoRAAdmission(max_loras=2, max_wait_steps=8)
    admission.begin_step(running=[3, 3, 0], pinned=[5])
    yield f"3, 3 and base run, 5 is pinned, two slots: taken are {sorted(admission.taken)}"
    yield f"who fits: {', '.join(f'{i} {admission.fits(i)}' for i in (0, 3, 4, 5))}"
    admission.begin_step(running=[0], pinned=[5, 6])
    yield f"5 and 6 are pinned: 4 never fits {admission.never_fits(4)}, base never fits {admission.never_fits(0)}"
    admission.begin_step(running=[], pinned=[])
    for adapter_id in (0, 8, 9):
        admission.take(adapter_id)
    yield f"base, 8 and 9 have joined: taken are {sorted(admission.taken)}"


def scheduler(num_blocks: int = 50, **limits: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 10, **limits}),
        CacheConfig(block_size=4, num_blocks=num_blocks),
        LoRAConfig(max_loras=2),
        pinned_adapters=set(),
    )


def add(to: Scheduler, name: str, adapter_id: int, length: int) -> None:
    """A request with a prompt of so many tokens."""
    lora = LoRARequest(f"adapter-{adapter_id}", adapter_id, "folder") if adapter_id else None
    prompt = [ord(name) + i for i in range(length)]
    to.add_request(Request(name, prompt, SamplingParams(max_tokens=6), lora))


def step(of: Scheduler) -> str:
    """Schedule one and take it as computed; what it gave."""
    output: SchedulerOutput = of.schedule()
    sampled = {s.request.request_id: [7] for s in output.scheduled if s.samples}
    of.update_from_output(output, sampled)
    tokens = ", ".join(f"{name} {n}" for name, n in output.num_scheduled_tokens.items())
    more = [
        f"passed over: adapters {sorted(output.passed_over)}" if output.passed_over else "",
        f"preempted: {', '.join(output.preempted)}" if output.preempted else "",
        f"ended by {output.halted_by}" if output.halted_by else "",
    ]
    return "; ".join([f"tokens: {tokens}", *filter(None, more)])


def demo_6_2() -> Iterator[str]:
    of = scheduler()
    for name, adapter_id in (("a", 1), ("b", 2), ("c", 3), ("d", 0), ("e", 1)):
        add(of, name, adapter_id, 2)
    yield "a to e want adapters 1, 2, 3, base and 1; two slots"
    for _ in range(2):
        yield f"  {step(of)}"
    of = scheduler(num_blocks=5, max_num_batched_tokens=40)
    for name, length in (("a", 9), ("b", 9), ("c", 1)):
        add(of, name, 0, length)
    yield "blocks for 16 tokens; a and b have 9, c has 1, and nobody passes b"
    yield f"  {step(of)}"


def demo_6_3() -> Iterator[str]:
    of = scheduler(num_blocks=8)
    for name, length in (("a", 21), ("b", 3)):
        add(of, name, 0, length)
    yield "a has 21 tokens, b 3; 10 a step, blocks for 28"
    for _ in range(8):
        yield f"  {step(of)}"


def demo_6() -> Iterator[str]:
    """Each request's line: the tokens that it computes in each step."""
    of, steps = scheduler(num_blocks=9, max_num_batched_tokens=8), 14
    wanted = {"a": (1, 5), "b": (2, 9), "c": (3, 2), "d": (0, 3), "e": (1, 2), "f": (3, 4)}
    for name, (adapter_id, length) in wanted.items():
        add(of, name, adapter_id, length)
    lines = {name: [] for name in wanted}
    held = []
    for _ in range(steps):
        output: SchedulerOutput = of.schedule()
        sampled = {s.request.request_id: [7] for s in output.scheduled if s.samples}
        running = [request.request_id for request in of.running]
        held.append(len({request.adapter_id for request in of.running} - {0}))
        of.update_from_output(output, sampled)
        for name, line in lines.items():
            is_over = name not in of.requests and name not in running
            waits = (
                "!" if name in output.preempted else " " if is_over else "." if name not in running else "-"
            )
            line.append(str(output.num_scheduled_tokens.get(name, waits)))
    yield "8 tokens a step, 2 slots, 36 tokens of KV cache; tokens of each request in each step"
    yield "  . waits   - runs without tokens   ! preempted"
    for name, (adapter_id, length) in wanted.items():
        yield f"  {name} adapter {adapter_id} prompt {length}   {'  '.join(lines[name])}".rstrip()
    yield f"  adapters that run      {'  '.join(map(str, held))}"
