"""A state that a broken-off call has torn is made whole again. Stands for nothing in vLLM (v0.22.1)."""

from collections.abc import Collection, Iterable

from minivllm.core.request import Request, RequestStatus, check_stop
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.output_processor import OutputProcessor, RequestState
from minivllm.engine.outputs import RequestOutput


def mend(engine: EngineCore, undelivered: Collection[RequestOutput]) -> None:
    """Every request goes on from its last output; what was done since then is done again.

    undelivered   outputs of the call that broke off; they count as delivered, since the next call returns them

    Requests that the output processor does not know are forgotten.
    """
    requests = rewind(engine.output_processor, undelivered)
    reset(engine.scheduler, requests)
    engine.runner.row_sampler.forget_all_but(request.request_id for request in requests)
    if engine.adapters is not None:
        mend_adapters(engine.adapters)


# ---- the scheduler --------------------------------------------------------------------------------------------


def reset(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Forget queues, blocks and clocks, and queue exactly these requests again, by `arrival_order`.

    For a step that broke off anywhere: only the requests themselves and the counters are believed. Requests that
    ran go on as after a preemption. Counters stay.

    requests    the unfinished ones
    """
    scheduler.clear()
    for request in sorted(requests, key=lambda request: request.arrival_order):
        scheduler.num_preemptions -= request.num_preemptions
        _start_over(request, scheduler.max_model_len)
        scheduler.num_preemptions += request.num_preemptions
        scheduler.add_request(request)


def _start_over(request: Request, max_model_len: int | None) -> None:
    """Back to the queue with nothing computed and no block, whatever it was in the middle of.

    A last token that ends the answer was never told, or the request would be finished: it is sampled again.
    """
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
    request.all_token_ids = request.prompt_token_ids + request.output_token_ids
    if request.output_token_ids and check_stop(request, max_model_len):
        request.output_token_ids.pop()
        request.all_token_ids.pop()
        request.status, request.stop_reason = RequestStatus.PREEMPTED, None
    request.num_computed_tokens = 0
    request.block_ids, request.block_hashes, request.cache_identity = [], [], None


# ---- the adapters ---------------------------------------------------------------------------------------------


def mend_adapters(adapters: AdapterRegistry) -> None:
    """Make names and slots agree with the records, and go on with what was ordered."""
    adapters.by_name = {name: adapter.id for adapter in adapters.adapters.values() for name in adapter.names}
    adapters.noted = set(adapters.adapters)
    adapters.pinned.intersection_update(adapters.adapters)  # the scheduler has the same set
    manager = adapters.manager
    for adapter_id in manager.pinned_adapters - adapters.pinned:
        manager.unpin_adapter(adapter_id)
    for adapter_id in manager.list_active_adapters().keys() - manager.list_adapters().keys():
        manager.deactivate_adapter(adapter_id)
    for adapter in list(adapters.adapters.values()):
        if not adapter.was_read:
            adapters.release_unused(adapter.id)
    adapters.settle()


# ---- the outputs ----------------------------------------------------------------------------------------------


def rewind(output_processor: OutputProcessor, undelivered: Iterable[RequestOutput]) -> list[Request]:
    """Unfinished requests, each set back to what it was after its last output.

    undelivered   outputs of a call that broke off; they count as delivered
    """
    for output in undelivered:
        output_processor.delivered(output)
    for state in output_processor.states.values():
        _rewind(state)
    return [state.request for state in output_processor.states.values()]


def _rewind(state: RequestState) -> None:
    request, num_tokens = state.request, state.num_emitted
    del request.output_token_ids[num_tokens:]
    request.all_token_ids = [*request.prompt_token_ids, *request.output_token_ids]
    request.status, request.stop_reason, request.error = RequestStatus.WAITING, None, None
    del state.logprobs[num_tokens:]
    tokens = zip(request.output_token_ids, state.logprobs)
    state.cumulative_logprob = sum(logprobs[token].logprob for token, logprobs in tokens)
    if state.answer is not None:
        state.answer.begin_again(num_tokens)
