"""One request from arrival to its last token. Stands for vllm/v1/request.py (v0.22.1)."""

import enum
from dataclasses import dataclass, field

from minivllm.layers.sampler import Logprob
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is. Whatever comes after PREEMPTED is finished, as in vLLM.

    Attributes of each member, since every request's are read several times a step:
    is_finished
    finish_reason   what a RequestOutput says of it: "stop", "length", "abort", "error"; None while unfinished
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    def __init__(self, value: int) -> None:
        self.is_finished = value > 2  # PREEMPTED
        self.finish_reason = (None, None, None, "stop", "length", "abort", "error")[value]


@dataclass(eq=False)
class Request:
    """A prompt, its answer so far, and what the scheduler knows about it. vLLM: `Request`.

    The only position that matters is `num_computed_tokens`: tokens whose keys and values are in the
    cache. A step computes some of those between it and `num_tokens`; there is no prefill or decode phase.

    lora_request        None for the base model
    arrival_time        seconds, on the caller's clock; order of arrival is that of `add_request`
    adapter_generation  which (re)load of its adapter it belongs to; a later one waits until all requests
                        of earlier ones are finished. It never falls from one arrival to the next: a reload concerns
                        only requests that arrive after it
    adapter_start       tokens before this one are computed by the base model, and only from it on by the adapter
    eos_token_ids       end-of-sequence ids of the model
    follows             a request with the same prompt that computes it first, so that this one finds it in the
                        prefix cache; None: it waits for no other request
    block_ids           KV blocks, in the order of the tokens they hold
    num_cached_tokens   prompt tokens found in the prefix cache when it was first admitted
    prompt_logprobs     of its prompt's tokens, as far as they are computed; [] where nobody asks for them
    lora_wait_steps     steps it has waited for its adapter to get a slot, until it last joined; a statistic
    error               why it ended as FINISHED_ERROR
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    lora_request: LoRARequest | None = None
    arrival_time: float = 0.0
    adapter_generation: int = 0
    adapter_start: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    follows: "Request | None" = field(default=None, repr=False)

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    adapter_id: int = field(init=False)
    arrival_order: int = field(default=-1, init=False)

    output_token_ids: list[int] = field(default_factory=list, init=False)
    all_token_ids: list[int] = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list, init=False)
    # Owned by the WaitingQueue.
    lora_wait_steps: int = field(default=0, init=False)
    lora_steps_at_entry: int = field(default=0, init=False, repr=False)

    # Owned by the KVCacheManager.
    block_ids: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False, repr=False)
    cache_identity: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.adapter_id = self.lora_request.lora_int_id if self.lora_request else 0
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and answer."""
        return len(self.all_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed for its logprobs: what others computed is of no use then."""
        wanted = self.sampling_params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def append_output_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)


def check_stop(request: Request, max_model_len: int | None) -> bool:
    """Finish the request if its last token ends it; True if so. vLLM: `check_stop` in v1/core/sched/utils.py.

    Sets `status`, and `stop_reason` if one of `stop_token_ids` ended it. Stop strings are the engine's
    business: it has the text.
    """
    params, last, num_output = (
        request.sampling_params,
        request.output_token_ids[-1],
        len(request.output_token_ids),
    )
    if num_output >= params.min_tokens:
        if last in request.eos_token_ids and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
        elif last in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last
    if not request.status.is_finished:
        is_full = max_model_len is not None and len(request.all_token_ids) >= max_model_len
        if num_output >= params.max_tokens or is_full:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return request.status.is_finished
