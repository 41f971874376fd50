"""How one request picks its tokens and when it stops. Stands for vllm/sampling_params.py (v0.22.1)."""

import math
from dataclasses import dataclass
from typing import Any

# Below this a temperature is a greedy choice (vLLM's _SAMPLING_EPS): dividing by less only breeds infinities.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """vLLM's SamplingParams, without its penalties, structured outputs and beam search.

    temperature: 0 (below 1e-5) is greedy; the filters and the seed then change nothing.
    top_p: in (0, 1]; the smallest set of likeliest tokens that holds this mass. 1 is off.
    top_k: this many likeliest tokens, and those tied with the last. 0 (or -1) is off.
    min_p: in [0, 1]; tokens at least this likely relative to the likeliest. 0 is off.
    seed: makes a request's tokens its own, whatever it is batched with. None: the engine's generator.
    stop: string(s) that end the text; kept as a list. They need `detokenize`.
    stop_token_ids: ids that end the request, beside the model's own end-of-sequence ids.
    ignore_eos: go on past the end-of-sequence ids (but never past `stop_token_ids`).
    max_tokens: at most so many new tokens.
    min_tokens: neither ids nor strings stop the request before so many new tokens.
    logprobs: None, or how many of the likeliest tokens to report beside each sampled one.
    Raises ValueError naming the field, its value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_flags()
        self._check_distribution()
        self._check_length()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop strings {self.stop} need the text to be made; leave detokenize on")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def verify_with_vocab(self, vocab_size: int) -> None:
        """Check what only the model knows: raises ValueError naming the ids outside 0..vocab_size - 1."""
        unknown = [token_id for token_id in self.stop_token_ids if token_id >= vocab_size]
        if unknown:
            raise ValueError(
                f"stop_token_ids {unknown} are unknown to this model; use ids from 0 to {vocab_size - 1}"
            )
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ValueError(f"logprobs is {self.logprobs} but the vocabulary has only {vocab_size} tokens")

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_distribution(self) -> None:
        if not (_is_number(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be a finite number of at least 0 (0 is greedy), got {self.temperature!r}"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1] (1 is off), got {self.top_p!r}")
        if not (_is_int(self.top_k) and self.top_k >= -1):
            raise ValueError(f"top_k must be an integer of at least 1, or 0 for off, got {self.top_k!r}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must be in [0, 1] (0 is off), got {self.min_p!r}")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise ValueError(f"seed must be an integer in [0, 2**64) or None, got {self.seed!r}")

    def _check_length(self) -> None:
        if not (_is_int(self.n) and self.n == 1):
            raise ValueError(f"n must be 1, got {self.n!r}; for more answers send the prompt again")
        if not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens):
            raise ValueError(
                f"min_tokens must be an integer in [0, max_tokens={self.max_tokens}], got {self.min_tokens!r}"
            )
        if self.logprobs is not None and not (_is_int(self.logprobs) and self.logprobs >= 0):
            raise ValueError(f"logprobs must be an integer of at least 0, or None, got {self.logprobs!r}")


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else _listed("stop", stop)
    if not all(isinstance(string, str) for string in strings):
        raise ValueError(f"stop must hold strings only, got {stop!r}")
    if "" in strings:
        raise ValueError(f"stop must not hold an empty string, which would match at once, got {stop!r}")
    return strings


def _stop_ids(stop_token_ids: list[int] | None) -> list[int]:
    ids = _listed("stop_token_ids", stop_token_ids)
    if not all(_is_int(token_id) and token_id >= 0 for token_id in ids):
        raise ValueError(f"stop_token_ids must be token ids, integers of at least 0, got {stop_token_ids!r}")
    return ids


def _listed(name: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return list(value or ())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
