"""The rows of one step. Stands for vllm/v1/worker/gpu_input_batch.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams

# Stands for the base model where it computes tokens of a request whose adapter begins later.
BASE_ROW = Request("base", [0], SamplingParams())


class InputBatch:
    """One row for every running request, in the order of adapters. vLLM: `InputBatch`.

    vLLM keeps its batch from step to step and patches it. Here it is built anew from the scheduler's output: that
    costs microseconds a request, and leaves nothing to go stale.

    requests               P rows, base rows first, then by adapter: a run of rows is an adapter
    num_scheduled_tokens   (P,) tokens of each row in this step; 0 for a running request that gets none
    num_sampled_tokens     (P,) 1 where the row's tokens reach the end of what is known, else 0
    """

    def __init__(
        self,
        requests: Sequence[Request],
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray,
    ) -> None:
        self.requests = list(requests)
        self.num_scheduled_tokens = num_scheduled_tokens
        self.num_sampled_tokens = num_sampled_tokens

    @property
    def req_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def split_at_adapters(self, starts: Sequence[int] | None = None) -> "InputBatch":
        """The rows by who computes them: itself, unless the adapter of a request begins late (`adapter_start`).

        starts   (P,) the position of each row's first token; None = where its request's computed tokens end

        Tokens that the base model computes for such a request are a base row before its own, which may be empty. Of a
        row's tokens the last ones are those that are sampled. The tokens keep their order.
        """
        if not any(map(attrgetter("adapter_start"), self.requests)):
            return self
        if starts is None:
            starts = [request.num_computed_tokens for request in self.requests]
        rows = []
        counts = self.num_scheduled_tokens.tolist(), self.num_sampled_tokens.tolist()
        for request, start, tokens, samples in zip(self.requests, starts, *counts):
            of_base = min(max(request.adapter_start - start, 0), tokens)
            sampled_of_base = max(samples - (tokens - of_base), 0) if of_base else 0
            if of_base:
                rows.append((BASE_ROW, of_base, sampled_of_base))
            rows.append((request, tokens - of_base, samples - sampled_of_base))
        requests, tokens, samples = zip(*rows)
        return InputBatch(requests, np.array(tokens, dtype=np.int64), np.array(samples, dtype=np.int64))

    # region lab 7.1: adapters of every token and every sampled row
    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput) -> "InputBatch":
        """A row for each request of `output.running`, of which there is at least one, in the order of adapters.

        By hand: a (adapter 7), b (base), c (adapter 7) and d (base) run. The budget of this step was enough for a,
        which decodes, and for the first 4 tokens of b's long prompt:

            requests               b  d  a  c    base first; of one adapter in the scheduler's order
            num_scheduled_tokens   4  0  1  0    int64
            num_sampled_tokens     0  0  1  0    int64

        c and d run as well: a step that did not know of c could give its slot away.

        To use: `request`, `num_new_tokens` and `samples` of what is scheduled (core/output.py); `request_id`,
        `adapter_id` and `lora_request` of a request (core/request.py).
        """
        raise Todo("lab 7.1: adapters of every token and every sampled row")

    def make_lora_inputs(
        self, num_scheduled_tokens: np.ndarray, num_sampled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """Adapter ids of what the step computes, 0 for base. vLLM: the same name.

        num_scheduled_tokens, num_sampled_tokens   (P,) int, one entry a row; they may be others than the batch's own

        By hand, three rows, of base, of adapter 5 and of adapter 2, with 2, 0 and 3 tokens, of which the last row
        samples one:

            prompt_lora_mapping   (2,)             whose a sampled token is
            token_lora_mapping    (0, 0, 2, 2, 2)  whose a token is
            lora_requests         those of adapters 5 and 2. A row without tokens runs as well, so its adapter must stay

        The mappings become part of a memo's key: tuples of Python's own ints. An adapter is asked for once, whatever
        names its requests have for it.
        """
        raise Todo("lab 7.1: adapters of every token and every sampled row")

    # endregion
