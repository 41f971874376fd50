"""Several answers to one prompt. Stands for vllm/v1/engine/parallel_sampling.py (v0.22.1).

Each answer is a request of its own, a child, which the scheduler treats like any other. What leaves the engine is one
output of the parent, with the answers of all its children.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import id_in_use
from minivllm.sampling_params import SamplingParams


@dataclass
class ParentRequest:
    """A request for n answers. vLLM: `ParentRequest`.

    request   as the caller gave it; no scheduler knows it
    latest    the last output of each child
    """

    request: Request
    children: list[Request] = field(init=False)
    latest: list[RequestOutput | None] = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        self.children = [
            replace(self.request, request_id=own_id, sampling_params=own)
            for own_id, own in zip(child_ids(self.request.request_id, params.n), child_params(params))
        ]
        self.latest = [None] * params.n

    @property
    def request_ids(self) -> list[str]:
        """Its children's."""
        return [child.request_id for child in self.children]

    def merged(self, outputs: Sequence[RequestOutput]) -> RequestOutput:
        """The parent's output after some of its children's. The same outputs may be given again."""
        for output in outputs:
            self.latest[self.request_ids.index(output.request_id)] = output
        known = [output for output in self.latest if output is not None]
        completions = [self._completion(i, outputs) for i in range(len(self.children))]
        finished = all(completion.finished() for completion in completions)
        last = max((output.metrics.finished_time or 0.0 for output in known), default=0.0)
        return replace(
            known[0],
            request_id=self.request.request_id,
            outputs=completions,
            finished=finished,
            error=next((output.error for output in known if output.error is not None), None),
            metrics=replace(known[0].metrics, finished_time=last if finished else None),
        )

    def _completion(self, index: int, outputs: Sequence[RequestOutput]) -> CompletionOutput:
        """One child's answer so far; of its deltas those in `outputs`."""
        latest, request_id = self.latest[index], self.children[index].request_id
        if latest is None:
            return CompletionOutput(index, "", [])
        new = [output.outputs[0] for output in outputs if output.request_id == request_id]
        return replace(
            latest.outputs[0],
            index=index,
            delta_text="".join(completion.delta_text for completion in new),
            delta_token_ids=[token for completion in new for token in completion.delta_token_ids],
        )


class ParallelSampling:
    """All parents whose children are in an engine.

    Where a prompt fills a KV block that others can find, the first child computes it alone and the others follow it
    (`Request.follows`), so that the prompt is computed once. All children are added together, though: they have the
    parent's place in the queue and its generation of the adapter, whatever arrives before the last of them runs.
    """

    def __init__(self, scheduler: Scheduler, output_processor: OutputProcessor) -> None:
        self.scheduler = scheduler
        self.output_processor = output_processor
        self.parents: dict[str, ParentRequest] = {}  # by the ids of their children
        self._told: list[str] = []  # parents whose last output was merged in the last call

    def new_parent(self, request: Request) -> ParentRequest:
        """A request for more than one answer with its children, for `add`; nothing has changed yet."""
        parent = ParentRequest(request)
        cache = self.scheduler.kv_cache
        if cache.enable_caching and request.num_prompt_tokens > cache.block_size:
            for child in parent.children[1:]:
                child.follows = parent.children[0]
        return parent

    def add(self, parent: ParentRequest) -> None:
        """From now on outputs of its children are the parent's. The caller adds the children to the scheduler."""
        self.parents.update(dict.fromkeys(parent.request_ids, parent))

    def merged(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Outputs of requests as their callers know them: one for all of a parent's children.

        Parents that ended in the call before are forgotten, unless their outputs come again.
        """
        if not self.parents:
            return outputs
        of_parent: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            if parent := self.parents.get(output.request_id):
                of_parent.setdefault(parent.request.request_id, []).append(output)
        self.forget(i for i in self._told if i not in of_parent)
        merged = [self.parents[child_id(i, 0)].merged(children) for i, children in of_parent.items()]
        self._told = [output.request_id for output in merged if output.finished]
        return [output for output in outputs if output.request_id not in self.parents] + merged

    def claim(self, request_id: str, n: int, undelivered: Collection[RequestOutput]) -> None:
        """Make sure that a request to come, and its children, have ids of their own. ValueError if one is in use."""
        for claimed in [request_id, *child_ids(request_id, n)]:
            if self.is_in_use(claimed, undelivered):
                raise id_in_use(claimed)
            self.forget([claimed, self.asked_as(claimed)])  # parents that have ended

    def is_in_use(self, request_id: str, undelivered: Collection[RequestOutput]) -> bool:
        """Whether a request, a parent or a child has this id and is not at its end.

        undelivered   outputs that no caller has yet: a request is at its end when its last one is delivered
        """
        parent = self.parents.get(request_id)
        ids = [request_id, *self.children_of(request_id), *(parent.request_ids if parent else ())]
        waiting = {output.request_id for output in undelivered}
        return any(i in self.output_processor.states or i in waiting for i in ids)

    def asked_as(self, request_id: str) -> str:
        """The id that its caller knows a request by: for a child its parent's."""
        parent = self.parents.get(request_id)
        return parent.request.request_id if parent else request_id

    def children_of(self, request_id: str) -> list[str]:
        """Ids of a parent's children; [] if there is no such parent."""
        parent = self.parents.get(child_id(request_id, 0))
        return parent.request_ids if parent and parent.request.request_id == request_id else []

    def ids_within(self, request_ids: Iterable[str]) -> list[str]:
        """Ids that the engine uses: for a parent those of its children. Nobody else names a child."""
        return [
            inner
            for request_id in request_ids
            for inner in self.children_of(request_id) or [request_id] * (request_id not in self.parents)
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        """These parents, if they are any, have ended."""
        for request_id in request_ids:
            for child in self.children_of(request_id):
                self.parents.pop(child, None)
        self._told = [request_id for request_id in self._told if self.children_of(request_id)]


def child_id(request_id: str, index: int) -> str:
    """As in vLLM."""
    return f"{index}_{request_id}"


def child_ids(request_id: str, n: int) -> list[str]:
    """Of n children; a request for one answer has none."""
    return [child_id(request_id, i) for i in range(n)] if n > 1 else []


def child_params(params: SamplingParams) -> list[SamplingParams]:
    """One for each answer, its seed the parent's plus its index. The first alone has `prompt_logprobs`."""
    return [
        replace(
            params,
            n=1,
            seed=None if params.seed is None else (params.seed + i) % 2**64,
            prompt_logprobs=None if i else params.prompt_logprobs,
        )
        for i in range(params.n)
    ]
