"""From logits to tokens. Stands for vllm/v1/sample/sampler.py and vllm/logprobs.py (v0.22.1)."""

from dataclasses import dataclass


@dataclass
class Logprob:
    """What the model thought of one token; vLLM's Logprob.

    logprob: natural logarithm of its probability under the raw logits, before temperature and filters.
    rank: 1 for the likeliest token; tied tokens share a rank.
    decoded_token: the token alone as text, once a tokenizer has seen it.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
