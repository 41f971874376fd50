"""Text out of tokens, as they come. Stands for vllm/v1/engine/detokenizer.py (v0.22.1)."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from minivllm.layers.sampler import Logprob
from minivllm.sampling_params import SamplingParams


class IncrementalDetokenizer:
    """One request's text, made token by token; vLLM's FastIncrementalDetokenizer.

    The text ends before (or with `include_stop_str_in_output`, after) the stop string that is complete first;
    of several complete at the same character the longest counts. How the text is cut into tokens changes
    nothing. Text that may yet turn out to be part of a stop string is held back, and no more than that.

    A finished text is `tokenizer.decode(token_ids, skip_special_tokens)` up to the stop. The one exception:
    where bytes that are no UTF-8 make a byte-fallback tokenizer take back text, what was shown stays.

    tokenizer: a transformers fast tokenizer; None, or `detokenize` off, gives empty text
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._params = params
        self._tokenizer = fast_backend(tokenizer) if tokenizer is not None and params.detokenize else None
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._token_ids: list[int] = []
        self._undecoded: list[int] = []  # the last ids, whose bytes are no whole character yet
        self._decoded = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        """What may be shown: the sum of all pieces so far."""
        return self._decoded[: self._num_shown]

    def update(
        self, new_token_ids: Sequence[int], finished: bool, stop_terminated: bool = False
    ) -> tuple[str, str | None]:
        """Take in tokens; give the piece of text they add and the stop string they complete, if any.

        finished: no more tokens will come, so nothing is held back; a stop string finishes by itself
        stop_terminated: the last token is a stop token, so it has no text (unless stops are to be included)
        """
        if self._tokenizer is None:
            return "", None
        num_searched = self._decode(new_token_ids, without_last=stop_terminated)
        if finished or stop_terminated:
            self._decoded += self._incomplete_end()
            self._undecoded = []
        stop_string = self._cut_at_stop(num_searched)
        ended = finished or stop_terminated or stop_string is not None
        num_shown = len(self._decoded) - (0 if ended else self._num_held_back())
        piece = self._decoded[self._num_shown : num_shown]
        self._num_shown = num_shown
        return piece, stop_string

    def _decode(self, new_token_ids: Sequence[int], without_last: bool) -> int:
        """Append the tokens' text; return how much of the text is too old for a stop string to end in."""
        num_searched = len(self._decoded)
        with_text = len(new_token_ids)
        if without_last and not self._params.include_stop_str_in_output:
            with_text -= 1
        for token_id in new_token_ids[:with_text]:
            self._token_ids.append(token_id)
            self._decoded += self._decode_next(token_id)
            if len(self._token_ids) <= self._params.min_tokens:
                num_searched = len(self._decoded)
        return num_searched

    def _decode_next(self, token_id: int) -> str:
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the tokenizers library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # A byte-fallback tokenizer took back text that has been given out: go on behind that text.
            piece = self._decode_alone(self._undecoded)
            self._stream = DecodeStream(skip_special_tokens=self._params.skip_special_tokens)
        if piece is None:
            return ""
        self._undecoded = []
        return piece

    def _incomplete_end(self) -> str:
        """What the stream keeps because it ends amid a character, as the tokenizer shows it."""
        if not self._undecoded:
            return ""
        whole = self._decode_alone(self._token_ids)
        if whole.startswith(self._decoded):
            return whole[len(self._decoded) :]
        return self._decode_alone(self._undecoded)

    def _decode_alone(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)

    def _cut_at_stop(self, num_searched: int) -> str | None:
        """Find the first stop string that ends past `num_searched` characters, and cut the text there."""
        if len(self._token_ids) <= self._params.min_tokens:
            return None
        matches = []
        for stop in self._params.stop:
            start = self._decoded.find(stop, max(0, num_searched + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        end, start, stop = min(matches)
        self._decoded = self._decoded[: end if self._params.include_stop_str_in_output else start]
        return stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        if self._params.include_stop_str_in_output:
            return 0
        longest = max((len(stop) - 1 for stop in self._params.stop), default=0)
        for length in range(min(longest, len(self._decoded)), 0, -1):
            end = self._decoded[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._params.stop):
                return length
        return 0


def add_decoded_tokens(tokenizer: Any, logprobs: dict[int, Logprob]) -> None:
    """Fill in `decoded_token`: each token's text alone, special ones included."""
    backend = fast_backend(tokenizer)
    for token_id, logprob in logprobs.items():
        logprob.decoded_token = backend.decode([token_id], skip_special_tokens=False)


def fast_backend(tokenizer: Any) -> Tokenizer:
    """The tokenizers library's object inside a transformers tokenizer. ValueError if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer; give the model folder a tokenizer.json"
        )
    return backend
