"""Outputs of the engine in OpenAI's format: whole responses and the events of streams.

Stands for vllm/entrypoints/openai/{completion,chat_completion}/serving.py (v0.22.1).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.layers.sampler import Logprob
from minivllm.server.errors import encode

LEAST_LOGPROB = -9999.0  # vLLM's: JSON has no infinity

VERSION_HEADER = "x-lora-version"

TokenLogprobs = dict[int, Logprob]  # of one generated token: its own first, then the likeliest


@dataclass
class Formatter:
    """Formats the answers to one HTTP request.

    id, model        as the client sees them
    shows_token_ids  whether choices have their `token_ids`, too
    """

    id: str
    model: str
    shows_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    whole_object = chunk_object = ""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response to a request without `stream`; outputs: the last of each prompt"""
        n = len(outputs[0].outputs)
        choices = [
            self.choice(number * n + answer.index, answer)
            for number, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return {
            **self._head(self.whole_object),
            "choices": choices,
            "usage": usage(outputs),
            **version_field(outputs[0]),
        }

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream, as it is sent."""
        return self._event_head + encode({"choices": choices, **more})[1:] + b"\n\n"

    @cached_property
    def _event_head(self) -> bytes:
        """The beginning of all events of a stream, up to their choices; encoded once."""
        return b"data: " + encode(self._head(self.chunk_object))[:-1] + b","

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice in the event that begins a stream, before any token; None where there is no such event."""
        return None

    def has_event(self, answer: CompletionOutput) -> bool:
        """Whether the deltas of an answer make an event."""
        shows_tokens = self.shows_token_ids or answer.logprobs is not None
        return bool(answer.delta_text or answer.finished() or (shows_tokens and answer.delta_token_ids))

    def end(self, answer: CompletionOutput, token_ids: list[int]) -> dict[str, Any]:
        """The last fields of choices of all kinds."""
        shown = {"token_ids": token_ids} if self.shows_token_ids else {}
        return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason, **shown}

    def choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        """A whole answer as a choice."""
        raise NotImplementedError

    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        """The deltas of an answer as a choice."""
        raise NotImplementedError


@dataclass
class CompletionFormatter(Formatter):
    """For /v1/completions.

    echoes    by a prompt's number the text that its answers begin with; empty unless `echo`
    n         answers to a prompt
    lengths   index of an answer -> characters that were streamed, for `text_offset`
    """

    echoes: Sequence[str] = ()
    n: int = 1
    lengths: dict[int, int] = field(default_factory=dict)

    whole_object = chunk_object = "text_completion"

    def first(self, index: int) -> dict[str, Any] | None:
        if not self.echoes:
            return None
        return {"index": index, "text": self.echo(index), "logprobs": None, "finish_reason": None}

    def echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        logprobs = completion_logprobs(answer.token_ids, answer.logprobs, 0)
        text = self.echo(index) + answer.text
        return {"index": index, "text": text, "logprobs": logprobs, **self.end(answer, answer.token_ids)}

    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        ids = answer.delta_token_ids
        logprobs = completion_logprobs(ids, new_logprobs(answer), self.lengths.get(index, 0))
        if logprobs is not None:
            self.lengths[index] = self.lengths.get(index, 0) + sum(map(len, logprobs["tokens"]))
        text = answer.delta_text
        return {"index": index, "text": text, "logprobs": logprobs, **self.end(answer, ids)}


@dataclass
class ChatFormatter(Formatter):
    """For /v1/chat/completions. top_logprobs: how many of the likeliest tokens each token comes with"""

    top_logprobs: int = 0

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(answer.token_ids, answer.logprobs, self.top_logprobs)
        message = {"role": "assistant", "content": answer.text}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **self.end(answer, answer.token_ids),
        }

    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(answer.delta_token_ids, new_logprobs(answer), self.top_logprobs)
        delta = {"content": answer.delta_text} if answer.delta_text else {}
        end = self.end(answer, answer.delta_token_ids)
        return {"index": index, "delta": delta, "logprobs": logprobs, **end}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The numbers of tokens of all prompts and of all their answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answers = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def version_field(output: RequestOutput) -> dict[str, int]:
    """`lora_version`: the version of the adapter's weights; nothing for the base model."""
    return {} if output.lora_version is None else {"lora_version": output.lora_version}


def version_header(output: RequestOutput) -> dict[str, str]:
    """The same as a header; of a stream what it begins with."""
    return {} if output.lora_version is None else {VERSION_HEADER: str(output.lora_version)}


def new_logprobs(answer: CompletionOutput) -> list[TokenLogprobs] | None:
    """The logprobs of the new tokens."""
    if answer.logprobs is None:
        return None
    return answer.logprobs[len(answer.logprobs) - len(answer.delta_token_ids) :]


def completion_logprobs(
    token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None, offset: int
) -> dict[str, Any] | None:
    """Logprobs in OpenAI's format for completions; None if the request did not ask for them.

    offset   characters of the answer before the first of these tokens
    """
    if logprobs is None:
        return None
    tokens = [text_of(entry[token_id]) for token_id, entry in zip(token_ids, logprobs)]
    offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    tops = [{text_of(each): finite(each.logprob) for each in entry.values()} for entry in logprobs]
    own = [finite(entry[token_id].logprob) for token_id, entry in zip(token_ids, logprobs)]
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None, most: int
) -> dict[str, Any] | None:
    """Logprobs in OpenAI's format for chats; None if the request did not ask for them.

    most   likeliest tokens that each token comes with
    """
    if logprobs is None:
        return None
    content = []
    for token_id, entry in zip(token_ids, logprobs):
        likeliest = sorted(entry.values(), key=lambda each: each.rank)[:most]
        content.append({**_token(entry[token_id]), "top_logprobs": [_token(each) for each in likeliest]})
    return {"content": content}


def _token(logprob: Logprob) -> dict[str, Any]:
    text = text_of(logprob)
    return {"token": text, "logprob": finite(logprob.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def text_of(logprob: Logprob) -> str:
    """The text of the token alone; empty without a tokenizer."""
    return logprob.decoded_token or ""


def finite(value: float) -> float:
    """A number that JSON can hold: neither infinite nor NaN."""
    return max(LEAST_LOGPROB, value)  # in this order, because NaN is greater than nothing
