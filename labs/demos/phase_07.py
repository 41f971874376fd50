"""One step of the engine."""

from collections.abc import Iterator

import numpy as np

from labs.demos.small import small_engine
from minivllm import LLMEngine, SamplingParams
from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.lora.request import LoRARequest
from minivllm.worker.input_batch import InputBatch

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def lora(adapter_id: int) -> LoRARequest | None:
    return LoRARequest(f"adapter-{adapter_id}", adapter_id, "folder") if adapter_id else None


def demo_7_1() -> Iterator[str]:
    requests = [
        Request(name, [5, 6, 7], GREEDY, lora(i)) for name, i in (("a", 2), ("b", 0), ("c", 1), ("d", 2))
    ]
    output = SchedulerOutput(running=requests)
    for request, tokens, samples in zip(requests, (3, 1, 2), (True, True, False)):
        output.scheduled.append(ScheduledRequest(request, tokens, samples))
    batch = InputBatch.from_scheduler_output(output)
    rows = zip(batch.requests, batch.num_scheduled_tokens, batch.num_sampled_tokens)
    for request, tokens, samples in rows:
        yield f"row {request.request_id}: adapter {request.adapter_id}, {tokens} tokens, samples {samples}"
    prompts, of_tokens, adapters = batch.make_lora_inputs(
        batch.num_scheduled_tokens, batch.num_sampled_tokens
    )
    yield f"adapter of every token {of_tokens}, of every sampled row {prompts}"
    yield f"adapters that must stay: {sorted(request.lora_int_id for request in adapters)}"


def demo_7_2() -> Iterator[str]:
    with small_engine() as (engine, adapters):
        manager = engine.runner.lora_manager.manager
        for ids in ((1, 0), (2, 3)):
            requests = [Request(str(i), [5, 6], GREEDY, adapters[i]) for i in ids]
            two, samples = np.array([2, 2]), np.array([1, 0])
            batch = InputBatch(requests, two, samples)
            engine.runner.set_active_loras(batch, two, samples)
            backend = manager.punica_wrapper
            yield f"adapters {ids} run: slots hold {manager.lora_index_to_id}"
            tokens, rows = backend.token_lora_indices.tolist(), backend.sampler_indices.tolist()
            yield f"  slots of tokens {tokens}, of sampled rows {rows}"


def serve(engine: LLMEngine, adapters: list[LoRARequest | None]) -> None:
    """Three requests with one prompt: base, and two adapters."""
    for i in (0, 1, 2):
        engine.add_request(f"adapter {i}" if i else "base", [5, 6, 7, 8, 9], GREEDY, lora_request=adapters[i])


def demo_7_3() -> Iterator[str]:
    with small_engine(max_num_batched_tokens=12) as (engine, adapters):
        serve(engine, adapters)
        for _ in range(2):
            scheduled = engine.scheduler.schedule()
            yield f"a step of {scheduled.num_scheduled_tokens}"
            pending = engine.runner.launch_model(scheduled)
            rows = [request.request_id for request in pending.requests]
            yield f"  logits {tuple(pending.logits.shape)}, for {rows}"
            tokens = {name: [token] for name, (token, _) in engine.runner.sample_tokens(pending).items()}
            yield f"  tokens {dict(sorted(tokens.items()))}"
            engine.scheduler.update_from_output(scheduled, tokens)


def demo_7_4() -> Iterator[str]:
    with small_engine(max_num_batched_tokens=12) as (engine, adapters):
        serve(engine, adapters)
        for number in range(6):
            outputs = engine.step()
            said = [f"{o.request_id} {o.outputs[0].token_ids}{' ends' * o.finished}" for o in outputs]
            yield f"step {number}: {', '.join(said) or 'nothing'}"
