"""Prometheus metrics of the server: counters and histograms, of all requests and by adapter.

Stands for `PrometheusStatLogger` of vllm/v1/metrics/loggers.py (v0.22.1), with its names where it has them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from minivllm.engine.outputs import RequestOutput
from minivllm.server.access_log import Record
from minivllm.server.engine_metrics import AdapterEvents, EngineCollector
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.calls import EngineSnapshot

M = TypeVar("M", Counter, Histogram)

OTHER = "other"
MOST_RECENT = 1000

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
BETWEEN_TOKENS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
# Fewer, since every adapter has them.
BY_ADAPTER = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)


class ServerMetrics:
    """Counters and histograms of one server, in a registry of their own.

    engine           the engine's own numbers, as of the last `text`
    events           kind of an adapter's event -> its counter
    adapter_events   a listener that counts adapters' events (`AsyncLLM.watch_adapters`)
    recent_ttft      seconds to the first token of the last requests that finished, for the live page
    most_labels      adapters with a label of their own, the first that are seen; all others share `other`

    The base model counts as one of them, under its name. All metrics of the server begin at 0, and the counters of an
    adapter when its name is served, so that what has not happened yet is in the metrics, too.
    """

    def __init__(self, model_name: str, adapters: Iterable[str] = (), most_labels: int = 200) -> None:
        self.model_name, self.registry = model_name, CollectorRegistry()
        self.engine = EngineCollector(model_name)
        self.registry.register(self.engine)
        self._make_metrics()
        self.most_labels = most_labels
        self._labels: set[str] = set()
        self.adapter_events = AdapterEvents(self.events, self.label)
        self.recent_ttft: deque[float] = deque(maxlen=MOST_RECENT)
        for name in (model_name, *adapters):
            self.serve(name)

    async def text(self, llm: AsyncLLM) -> bytes:
        """All metrics in Prometheus' text format, with the engine's numbers of now."""
        self.engine.latest = await llm.call(EngineSnapshot.of)
        return generate_latest(self.registry)

    # region lab 9.5: labels and counts
    def label(self, name: str) -> str:
        """The label of an adapter: its own, or `other` once there are `most_labels`. A label is never freed."""
        if name not in self._labels and len(self._labels) >= self.most_labels:
            return OTHER
        self._labels.add(name)
        return name

    def serve(self, name: str) -> None:
        """Create the counters of an adapter, at 0, and its `adapter_ttft`; all under its label.

        The counters are requests, read, written, waits and all of `events`.
        """
        label = self.label(name)
        for counter in (self.requests, self.read, self.written, self.waits, *self.events.values()):
            counter.labels(label)
        self.adapter_ttft.labels(label)

    def tokens(self, adapter: str, count: int, seconds: float | None) -> None:
        """Count new tokens of a request: in `generation_tokens` of the server and `written` of its adapter.

        seconds   between two tokens, observed in `itl` once for each of them; None where it is unknown
        """
        self.generation_tokens.labels(self.model_name).inc(count)
        self.written.labels(self.label(adapter)).inc(count)
        for _ in range(0 if seconds is None else count):
            self.itl.labels(self.model_name).observe(seconds)

    def finished(self, adapter: str, output: RequestOutput) -> None:
        """Count a request that has had its last output.

        Each answer counts in `ended` under its finish_reason; the prompt's tokens once in `prompt_tokens`, and in
        `read` of the adapter. If there are `output.metrics`: the steps that it waited for a slot (`waits`), and the
        seconds from arrival to the first token (`ttft`, `recent_ttft`, `adapter_ttft`), the first step (`queued`) and
        the end (`e2e`), each if it is known.
        """
        for answer in output.outputs:
            self.ended.labels(self.model_name, answer.finish_reason or "abort").inc()
        self.prompt_tokens.labels(self.model_name).inc(len(output.prompt_token_ids))
        label, times = self.label(adapter), output.metrics
        self.read.labels(label).inc(len(output.prompt_token_ids))
        if times is None:
            return
        self.waits.labels(label).inc(times.lora_wait_steps)
        if times.time_to_first_token is not None:
            self.ttft.labels(self.model_name).observe(times.time_to_first_token)
            self.recent_ttft.append(times.time_to_first_token)
            self.adapter_ttft.labels(label).observe(times.time_to_first_token)
        if times.first_scheduled_time is not None:
            self.queued.labels(self.model_name).observe(times.first_scheduled_time - times.arrival_time)
        if times.finished_time is not None:
            self.e2e.labels(self.model_name).observe(times.finished_time - times.arrival_time)

    # endregion

    def begun(self, adapter: str) -> None:
        """The engine has added a request for an adapter."""
        self.requests.labels(self.label(adapter)).inc()

    def aborted(self) -> None:
        """A request has ended without a last output, because the engine did."""
        self.ended.labels(self.model_name, "abort").inc()

    def _make_metrics(self) -> None:
        def made(kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
            metric = kind(name, text, labels, registry=self.registry, **options)
            metric.labels = cache(metric.labels)  # each event looks a child up, and none is ever removed
            if labels == (model,):
                metric.labels(self.model_name)
            return metric

        model, adapter = "model_name", "adapter"
        counter, histogram = partial(made, Counter), partial(made, Histogram)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.", model)
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens of answers.", model)
        self.ended = counter("vllm:request_success", "Requests that ended.", model, "finished_reason")
        self.requests = counter("minivllm:adapter_requests", "Requests taken.", adapter)
        self.read = counter("minivllm:adapter_prompt_tokens", "Tokens of prompts.", adapter)
        self.written = counter("minivllm:adapter_generation_tokens", "Tokens of answers.", adapter)
        self.waits = counter(
            "minivllm:adapter_slot_wait_steps", "Steps that requests waited for a slot.", adapter
        )
        self.events = {
            "load": counter("minivllm:adapter_loads", "Times read from disk.", adapter),
            "activate": counter("minivllm:adapter_activations", "Times copied into a slot.", adapter),
            "evict": counter("minivllm:adapter_evictions", "Slots lost to another adapter.", adapter),
            "drop": counter("minivllm:adapter_drops", "Places in memory lost to another.", adapter),
        }
        to_first, to_last = "From arrival to the first token", "From arrival to the last token."
        seconds, by_adapter = {"buckets": SECONDS}, {"buckets": BY_ADAPTER}
        self.ttft = histogram("vllm:time_to_first_token_seconds", f"{to_first}.", model, **seconds)
        self.itl = histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of an answer.",
            model,
            buckets=BETWEEN_TOKENS,
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", to_last, model, **seconds)
        self.queued = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step.", model, **seconds
        )
        self.adapter_ttft = histogram(
            "minivllm:adapter_time_to_first_token_seconds", f"{to_first}, by adapter.", adapter, **by_adapter
        )


class Progress:
    """Counts one request of the engine in metrics and record, output by output.

    model        as the client calls it
    last_at      when the last tokens were seen, on `clock`
    num_tokens   of all its answers so far
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        record: Record,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics, self.record, self.model, self.clock = metrics, record, model, clock
        self.last_at: float | None = None
        self.num_tokens = 0
        self.begun = self.finished = False

    # region lab 9.5: what one request adds
    def observe(self, output: RequestOutput, all_are_seen: bool) -> None:
        """Count an output that was given to the client. It may hold the tokens of several steps.

        all_are_seen   whether the time between two outputs is that between their tokens; else that time is unknown

        The first output counts the request (`ServerMetrics.begun`), and its prompt's tokens in the record. The new
        tokens of all n answers count in metrics (`ServerMetrics.tokens`) and record. Each answer has an n-th of them,
        so the time between two of its tokens is the time since `last_at` divided by that. The record also notes the
        time of the first token (`Record.note_first_token`). The last output is counted by `ServerMetrics.finished`.
        """
        now = self.clock()
        if not self.begun:
            self.begun = True
            self.record.prompt_tokens += len(output.prompt_token_ids)
            self.metrics.begun(self.model)
        total = sum(len(answer.token_ids) for answer in output.outputs)
        if new := total - self.num_tokens:
            gap = None
            if all_are_seen and self.last_at is not None:
                gap = (now - self.last_at) * len(output.outputs) / new
            self.metrics.tokens(self.model, new, gap)
            self.record.completion_tokens += new
            self.record.note_first_token(output.metrics, now)
            self.num_tokens, self.last_at = total, now
        if output.finished:
            self.finished = True
            self.metrics.finished(self.model, output)

    def end(self) -> None:
        """There are no more outputs. A request that began and did not finish counts as `aborted`."""
        if self.begun and not self.finished:
            self.metrics.aborted()

    # endregion
