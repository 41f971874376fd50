"""Messages between an engine's process and its client's, above all outputs as deltas.

Stands for `EngineCoreOutputs` of vllm/v1/engine/__init__.py and for vllm/v1/serial_utils.py (v0.22.1), whose messages
are msgpack.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.engine.metrics import RequestMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import message_of
from minivllm.layers.sampler import Logprob

# Number, name of a method of `EngineHost`, and its arguments, pickled apart: those that cannot be unpickled fail this
# request alone.
Request = tuple[int, str, bytes]

# Fields of an output that seldom change.
STEADY = ("prompt", "prompt_token_ids", "lora_request", "num_cached_tokens", "error")


def portable(error: BaseException) -> BaseException:
    """The error, if it can be pickled and unpickled; else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # of any kind: classes may define how they are pickled
        return RuntimeError(message_of(error))


class AnswerDelta(NamedTuple):
    """What is new in one answer; the fields are those of `CompletionOutput`, logprobs those of the new tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None


class OutputDelta(NamedTuple):
    """What is new in a request's output, so that its size does not grow with the answers.

    answers   the deltas of the answers with anything new
    changed   field of `RequestOutput` -> its value, of the fields that have changed; `metrics` as a dict
    """

    num_answers: int
    finished: bool
    answers: list[AnswerDelta]
    changed: dict[str, Any]


class OutputWriter:
    """Turns one request's outputs into deltas, in the engine's process.

    last   the last output
    """

    def __init__(self) -> None:
        self.last: RequestOutput | None = None
        self._times: dict[str, Any] | None = None
        self._num_logprobs: dict[int, int] = {}  # answer's index -> tokens whose logprobs were sent

    def delta(self, output: RequestOutput) -> OutputDelta:
        """The difference to the output before."""
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
        answers = [
            self._answer_delta(answer)
            for answer in output.outputs
            if answer.delta_token_ids or answer.delta_text or answer.finish_reason is not None
        ]
        return OutputDelta(len(output.outputs), output.finished, answers, changed)

    def _answer_delta(self, answer: CompletionOutput) -> AnswerDelta:
        logprobs = answer.logprobs
        if logprobs is not None:
            known = self._num_logprobs.get(answer.index, 0)
            self._num_logprobs[answer.index] = len(logprobs)
            logprobs = logprobs[known:]
        return AnswerDelta(
            *(answer.index, answer.delta_text, answer.delta_token_ids),
            *(answer.finish_reason, answer.stop_reason, answer.cumulative_logprob, logprobs),
        )


class OutputReader:
    """Rebuilds one request's outputs from their deltas, in the client's process."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._output = RequestOutput(request_id, None, [], [], finished=False)

    def output(self, delta: OutputDelta) -> RequestOutput:
        """The output that the delta was made from."""
        changed, old = delta.changed, self._output.outputs
        if changed:
            if (times := changed.get("metrics")) is not None:
                changed["metrics"] = RequestMetrics(**times)
            self._output = replace(self._output, **changed)
        if not old:
            old = [CompletionOutput(index, "", []) for index in range(delta.num_answers)]
        last = self._output
        self._output = RequestOutput(  # `replace` takes 3 us more, for each output of each stream
            *(last.request_id, last.prompt, last.prompt_token_ids, answers_with(old, delta.answers)),
            *(delta.finished, last.lora_request, last.num_cached_tokens, last.prompt_logprobs),
            *(last.error, last.metrics),
        )
        return self._output


def answers_with(old: Sequence[CompletionOutput], deltas: Sequence[AnswerDelta]) -> list[CompletionOutput]:
    """All answers after their deltas."""
    by_index = {delta.index: delta for delta in deltas}
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
