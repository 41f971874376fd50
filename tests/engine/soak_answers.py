"""What a request of the soak got, against transformers + PEFT alone on that request."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from soak_disk import EOS, VersionedOracle

from minivllm import SamplingParams


@dataclass
class Sent:
    """A request that the engine took, and what came of it.

    arrival       counts requests, so that a reload ordered after it is known as such
    owed          the oldest version of its adapter that may answer it
    versions      of each token: the version that computed it; 0 for the base model
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    adapter_id: int
    arrival: int
    owed: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None


def verify_answers(done: Iterable[Sent], oracle: VersionedOracle) -> int:
    """Check every token of every request, aborted and failed ones too; the number of tokens checked.

    Requests that are not greedy are only checked for when they ended.
    """
    by_weights: dict[tuple[int, int], list[Sent]] = defaultdict(list)
    for sent in done:
        _check_end(sent)
        for version in set(sent.versions) if sent.params.is_greedy else ():
            by_weights[sent.adapter_id, version].append(sent)
    verified = 0
    for (adapter_id, version), group in by_weights.items():
        logits = oracle.logits(adapter_id, version, [sent.prompt + sent.tokens for sent in group])
        for sent, rows in zip(group, logits, strict=True):
            verified += _check_tokens(sent, version, rows[len(sent.prompt) - 1 :])
    return verified


def _check_tokens(sent: Sent, version: int, logits: torch.Tensor) -> int:
    """logits: (tokens + 1 or more, V), from those which the first token was picked by"""
    ours = [k for k, of_version in enumerate(sent.versions) if of_version == version]
    for k in ours:
        allowed = _penalized(logits[k], sent.params, sent.prompt, sent.tokens[:k])
        if k < sent.params.min_tokens:
            allowed[[EOS, *sent.params.stop_token_ids]] = -torch.inf
        likeliest, token = int(allowed.argmax()), sent.tokens[k]
        gap = float(allowed[likeliest] - allowed[token])
        assert token == likeliest, f"{sent}\ntoken {k} should be {likeliest} (by {gap:.3g})"
    return len(ours)


def _penalized(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """After bias and penalties by their definition, token by token.   logits: (V,) -> (V,)"""
    result = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        result[token] += bias
    for token in {*prompt, *output}:
        result[token] *= params.repetition_penalty if result[token] < 0 else 1 / params.repetition_penalty
    for token in output:
        result[token] -= params.frequency_penalty
    for token in set(output):
        result[token] -= params.presence_penalty
    return result


def _check_end(sent: Sent) -> None:
    """It ended with the first token that ends it, and said so."""
    params = sent.params
    reasons: list[str | None] = []
    for k, token in enumerate(sent.tokens, 1):
        stops = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        ends_early = stops and k >= params.min_tokens
        reasons.append("stop" if ends_early else "length" if k == params.max_tokens else None)
    assert not any(reasons[:-1]), f"went on past its end: {sent}"
    if sent.reason in ("stop", "length"):
        assert reasons[-1] == sent.reason, f"ended as {sent.reason}: {sent}"
    else:
        assert sent.reason in ("abort", "error") and not any(reasons), sent
