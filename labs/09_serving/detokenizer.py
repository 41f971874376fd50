"""Text out of tokens, as they come. Stands for vllm/v1/engine/detokenizer.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from minivllm.layers.sampler import Logprob
from minivllm.sampling_params import SamplingParams
from minivllm.text.stop_strings import StopStrings


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
        self._stops = StopStrings(params.stop)
        self._undecoded: list[int] = []  # the last ids, whose bytes are no whole character yet
        self._num_tokens = 0
        self._decoded = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        """What may be shown: the sum of all pieces so far."""
        return self._decoded[: self._num_shown]

    # region lab 9.6: what may be shown of a text
    def update(
        self, new_token_ids: Sequence[int], finished: bool, stop_terminated: bool = False
    ) -> tuple[str, str | None]:
        """Take in tokens; give the piece of text they add and the stop string they complete, if any.

        finished: no more tokens will come, so nothing is held back; a stop string finishes by itself. Bytes that
        would have become a character (`_undecoded`) are then text as the tokenizer shows it (`_decode_alone`)
        stop_terminated: the last token is a stop token, so it has no text (unless stops are to be included)

        Without a tokenizer there is no text. All pieces together are `text`, so nothing is shown twice.
        """
        raise Todo("lab 9.6: what may be shown of a text")

    def _take_in(self, token_ids: Sequence[int]) -> str | None:
        """Decode tokens one by one (`_decode_next`) until a stop string is complete; return that."""
        raise Todo("lab 9.6: what may be shown of a text")

    def _append(self, text: str) -> str | None:
        """Add text; if a stop string ends in it (`StopStrings.take_in`), cut all text there and return the stop string.

        The first `min_tokens` tokens complete none.
        """
        raise Todo("lab 9.6: what may be shown of a text")

    def _num_held_back(self) -> int:
        """Characters that a stop string may yet take back (`StopStrings.num_begun`); none where it is shown."""
        raise Todo("lab 9.6: what may be shown of a text")

    # endregion

    def _decode_next(self, token_id: int) -> str:
        """The characters that this token makes whole, if any."""
        self._undecoded.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the tokenizers library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # A byte-fallback tokenizer took back text that has been given out: go on behind that text.
            text = self._decode_alone(self._undecoded)
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._params.skip_special_tokens)
        if text is None:
            return ""
        self._undecoded = []
        return text

    def _decode_alone(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)


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
