"""Which tokens may come next in an answer with a given structure. Stands for vllm/v1/structured_output (v0.22.1).

vLLM's scheduler keeps the grammars, since its drafts of several tokens need them. Here the rows that sample do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minivllm.core.request import Request


class TokenMasks:
    """The state of each structured answer in its grammar.

    eos_token_ids   tokens that end an answer that is complete
    tokenizer       of the base model, whose tokens the logits are for; an adapter's own tokens are never allowed. None
                    where no answer has a structure
    """

    def __init__(self, eos_token_ids: Sequence[int], tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = list(eos_token_ids)
        self._matchers: dict[str, tuple[Any, int]] = {}  # and how many tokens of the answer each has seen
        self._vocabulary: Any = None

    def of(self, requests: Sequence[Request], vocab_size: int) -> list[torch.Tensor | None]:
        """For each row the tokens that may come next, (V,) bool on the CPU; None = any, also for finished requests.

        ValueError: an answer cannot be what its structure demands, because no token has one of its bytes, say.
        """
        return [
            self._mask(r, vocab_size) if r.sampling_params.structured_outputs and not r.is_finished else None
            for r in requests
        ]

    def _mask(self, request: Request, vocab_size: int) -> torch.Tensor:
        matcher, seen = self._matchers.get(request.request_id) or (self._begin(request, vocab_size), 0)
        # A step that is taken again finds the tokens of before; one that was preempted has them all still.
        if new := list(request.output_token_ids[seen:]):
            matcher.consume_tokens(new)
        self._matchers[request.request_id] = matcher, seen + len(new)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise ValueError(f"the structure of the answer cannot be followed: {matcher.get_error()}")
        return torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool))  # (V,)

    def _begin(self, request: Request, vocab_size: int) -> Any:
        import llguidance
        import llguidance.hf

        if self._vocabulary is None:  # the first time takes a third of a second for 49,152 tokens
            self._vocabulary = llguidance.hf.from_tokenizer(
                self.tokenizer, n_vocab=vocab_size, eos_token=self.eos_token_ids
            )
        return llguidance.LLMatcher(self._vocabulary, request.sampling_params.structured_outputs.guidance)

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._matchers.pop(request_id, None)
