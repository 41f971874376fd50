"""A request's answer as text. Stands for a part of vllm/v1/engine/output_processor.py (v0.22.1)."""

from collections.abc import Sequence
from typing import Any

from minivllm.core.request import Request, RequestStatus
from minivllm.errors import log_unexpected, recoverable
from minivllm.layers.sampler import Logprob
from minivllm.text.detokenizer import IncrementalDetokenizer, add_decoded_tokens


class Answer:
    """The text of one request's answer, and of the tokens whose logprobs were asked for.

    tokenizer     the model's or its adapter's
    detokenizer   its `text` may be shown so far
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.begin_again()

    def begin_again(self, num_tokens: int = 0) -> None:
        """Go back to the text of the first tokens, so many of them."""
        self.detokenizer = IncrementalDetokenizer(self.tokenizer, self.request.sampling_params)
        if num_tokens:
            self.detokenizer.update(self.request.output_token_ids[:num_tokens], finished=False)

    def update(self, new_token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> str:
        """Take in tokens; the piece of text that they add. `decoded_token` is filled in where logprobs have it.

        A stop string ends the request here: its status becomes FINISHED_STOPPED. An error of the tokenizer ends it,
        too: FINISHED_ERROR.
        """
        request = self.request
        try:
            for of_token in logprobs:
                add_decoded_tokens(self.tokenizer, of_token)
            # The token that ends a request has no text of its own.
            ended_by_token = request.status is RequestStatus.FINISHED_STOPPED
            piece, stop_string = self.detokenizer.update(new_token_ids, request.is_finished, ended_by_token)
            if stop_string is not None and request.status is not RequestStatus.FINISHED_ERROR:
                request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, stop_string
            return piece
        # A tokenizer may come with an adapter.
        except BaseException as error:
            request.status = RequestStatus.FINISHED_ERROR
            request.error = log_unexpected(recoverable(error), [request.request_id])
            return ""
