"""What goes between an engine's process and the one that asks it. Stands for `EngineCoreOutputs` of
vllm/v1/engine/__init__.py and for vllm/v1/serial_utils.py (v0.22.1), whose messages are msgpack.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.engine.metrics import RequestMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import message_of
from minivllm.layers.sampler import Logprob
from minivllm.processes import packed

Order = tuple[int, str, bytes]  # number, name of a method of `EngineHost`, pickled arguments

# Fields of an output that seldom change.
STEADY = ("prompt", "prompt_token_ids", "lora_request", "num_cached_tokens", "error")


def order(number: int, name: str, args: tuple) -> Order:
    """A message to the engine's process. Arguments that cannot be read there are this order's trouble alone."""
    return number, name, packed(args)


def portable(error: BaseException) -> BaseException:
    """The error, if it arrives whole on the other side; else a RuntimeError with its sentence."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # its class may do anything when it is copied
        return RuntimeError(message_of(error))


class News(NamedTuple):
    """What is new of one answer; the fields are those of `CompletionOutput`, logprobs those of the new tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None


class Delta(NamedTuple):
    """What is new of a request. It is small, however long its answers are.

    news      of the answers that have any
    changed   field of `RequestOutput` -> its value, where it is another one; `metrics` as a dict
    """

    num_answers: int
    finished: bool
    news: list[News]
    changed: dict[str, Any]


class OutputWriter:
    """One request's outputs as deltas, in the engine's process.

    last   the last output
    """

    def __init__(self) -> None:
        self.last: RequestOutput | None = None
        self._times: dict[str, Any] | None = None
        self._num_logprobs: dict[int, int] = {}  # answer's index -> of so many tokens they were sent

    def delta(self, output: RequestOutput) -> Delta:
        """What this output adds to the one before."""
        last, self.last = self.last, output
        changed = {
            name: value
            for name in STEADY
            if (value := getattr(output, name)) is not (None if last is None else getattr(last, name))
        }
        before = last and last.prompt_logprobs
        if output.prompt_logprobs is not None and output.prompt_logprobs is not before:
            changed["prompt_logprobs"] = output.prompt_logprobs
        times = None if output.metrics is None else dict(vars(output.metrics))
        if times != self._times:
            changed["metrics"] = self._times = times
        news = [
            self._news(answer)
            for answer in output.outputs
            if answer.delta_token_ids or answer.delta_text or answer.finish_reason is not None
        ]
        return Delta(len(output.outputs), output.finished, news, changed)

    def _news(self, answer: CompletionOutput) -> News:
        logprobs = answer.logprobs
        if logprobs is not None:
            known = self._num_logprobs.get(answer.index, 0)
            self._num_logprobs[answer.index] = len(logprobs)
            logprobs = logprobs[known:]
        return News(
            *(answer.index, answer.delta_text, answer.delta_token_ids),
            *(answer.finish_reason, answer.stop_reason, answer.cumulative_logprob, logprobs),
        )


class OutputReader:
    """One request's outputs from their deltas, in the process that asks."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._output = RequestOutput(request_id, None, [], [], finished=False)

    def output(self, delta: Delta) -> RequestOutput:
        """The output that the engine had."""
        changed, old = delta.changed, self._output.outputs
        if changed:
            if (times := changed.get("metrics")) is not None:
                changed["metrics"] = RequestMetrics(**times)
            self._output = replace(self._output, **changed)
        if not old:
            old = [CompletionOutput(index, "", []) for index in range(delta.num_answers)]
        last = self._output
        self._output = RequestOutput(
            *(last.request_id, last.prompt, last.prompt_token_ids, answers_with(old, delta.news)),
            *(delta.finished, last.lora_request, last.num_cached_tokens, last.prompt_logprobs),
            *(last.error, last.metrics),
        )
        return self._output


def answers_with(old: Sequence[CompletionOutput], news: Sequence[News]) -> list[CompletionOutput]:
    """All answers; the deltas of those without news are empty."""
    by_index = {new.index: new for new in news}
    return [
        replace(answer, delta_text="", delta_token_ids=[])
        if (new := by_index.get(answer.index)) is None
        else CompletionOutput(
            answer.index,
            answer.text + new.text,
            answer.token_ids + new.token_ids,
            new.cumulative_logprob,
            None if new.logprobs is None else (answer.logprobs or []) + new.logprobs,
            *(new.finish_reason, new.stop_reason, new.text, new.token_ids),
        )
        for answer in old
    ]
