"""Requests and scheduler outputs made by hand, so that a step can be tested without a scheduler."""

from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


def lora(adapter_id, name=None):
    return LoRARequest(name or f"adapter{adapter_id}", adapter_id, f"/adapters/{adapter_id}")


def make_request(request_id, prompt, lora_request=None, block_ids=(), **params):
    request = Request(
        request_id,
        list(prompt),
        SamplingParams(**{"temperature": 0, "max_tokens": 20, **params}),
        lora_request,
    )
    request.block_ids = list(block_ids)
    return request


def make_output(*scheduled, idle=()):
    """(request, tokens) pairs that get tokens, in this order; `idle` requests run too but get none."""
    output = SchedulerOutput()
    for request, num_tokens in scheduled:
        samples = request.num_computed_tokens + num_tokens == request.num_tokens
        output.scheduled.append(ScheduledRequest(request, num_tokens, samples))
        output.total_num_scheduled_tokens += num_tokens
    output.running = [*(request for request, _ in scheduled), *idle]
    return output
