"""Which version a request waits for, what an update does to others, whose tokens are whose, what an old one counts."""

from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from labs.demos.small import numbers, small_engine
from minivllm import LLMEngine, LoRARequest, SamplingParams
from minivllm.lora.request import AtLeast
from minivllm.versions.policy_loss import policy_loss
from minivllm.versions.weights import restarted, token_versions


def _update(engine: LLMEngine, other: LoRARequest, running: str) -> int:
    """adapter-1 gets the tensors of another one."""
    return engine.update_lora(
        "adapter-1", load_file(f"{other.lora_path}/adapter_model.safetensors"), running=running
    )


def _add(engine: LLMEngine, name: str, adapter: LoRARequest | str) -> None:
    engine.add_request(
        name,
        [5, 6, 7],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        lora_request=adapter,
    )


def demo_13_1() -> Iterator[str]:
    with small_engine() as (engine, (_, first, second, _)):
        engine.add_lora(first)
        _add(engine, "waits", AtLeast("adapter-1", 1))
        for step in range(1, 9):
            outputs = engine.step()
            tokens = len(outputs[0].outputs[0].token_ids) if outputs else 0
            yield f"step {step}: {tokens} tokens"
            if step == 2:
                yield f"update: version {_update(engine, second, 'finish')}"


def demo_13_2() -> Iterator[str]:
    for running in ("finish", "restart"):
        with small_engine() as (engine, (_, first, second, _)):
            _add(engine, "r", first)
            for _ in range(3):
                engine.step()
            _update(engine, second, running)
            computed = engine.scheduler.requests["r"].num_computed_tokens
            while engine.has_unfinished_requests():
                outputs = engine.step()
            versions = token_versions(outputs[0].lora_request, 6)
            yield f"{running}: {computed} of its tokens stay computed; versions of its answer {versions}"


def demo_13_3() -> Iterator[str]:
    versions = [LoRARequest("policy", 10 + n, "/nowhere", version=n) for n in range(4)]
    request, tokens = versions[0], 0
    for newest, more in zip(versions[1:], (4, 0, 3)):
        tokens += more
        request = restarted(request, tokens, newest)
        yield f"{more} more tokens, then version {newest.version}: before it {getattr(request, 'before', ())}"
    yield f"of 9 tokens: {token_versions(request, 9)}"


def demo_13_4() -> Iterator[str]:
    yield "one token, sampled with probability q, now it has p; its advantage is 1"
    for q, p in ((0.5, 0.5), (0.8, 0.5), (0.2, 0.5), (0.1, 0.9)):
        new = torch.tensor([[p]], dtype=torch.float64).log().requires_grad_()
        policy_loss(new, torch.tensor([[q]], dtype=torch.float64).log(), torch.ones(1)).backward()
        yield f"q {q}, p {p}: the loss falls by {numbers(-new.grad[0])} times what its logprob rises"
