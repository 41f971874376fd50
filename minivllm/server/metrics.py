"""What a monitor reads. Stands for vllm/v1/metrics/loggers.py (v0.22.1), with its names where it has them."""

from collections import deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.server.engine_metrics import AdapterEvents, EngineCollector, EngineView

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

    recent_ttft   seconds to the first token of the last requests that ended, for the live page
    most_labels   adapters with a label of their own, the first that are seen; all others share `other`

    The base model counts as one of them, under its name. An adapter has its counters, at 0, from when its name is
    served: one that nobody asks for is not forgotten.
    """

    def __init__(self, model_name: str, adapters: Iterable[str] = (), most_labels: int = 200) -> None:
        self.registry = CollectorRegistry()
        self.model_name, self.most_labels = model_name, most_labels
        self.engine = EngineCollector(model_name)
        self.registry.register(self.engine)
        self._labels: set[str] = set()
        self.recent_ttft: deque[float] = deque(maxlen=MOST_RECENT)
        self._make_counters()
        self._make_histograms()
        for name in (model_name, *adapters):
            self.serve(name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _make_counters(self) -> None:
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.", "model_name")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.", "model_name")
        self.ended = self._counter(
            "vllm:request_success", "Requests that ended.", "model_name", "finished_reason"
        )
        self.requests = self._counter("minivllm:adapter_requests", "Requests taken.", "adapter")
        self.read = self._counter("minivllm:adapter_prompt_tokens", "Tokens of prompts.", "adapter")
        self.written = self._counter("minivllm:adapter_generation_tokens", "Tokens of answers.", "adapter")
        self.waits = self._counter(
            "minivllm:adapter_slot_wait_steps", "Steps that requests waited for a slot.", "adapter"
        )
        self.events = {
            "load": self._counter("minivllm:adapter_loads", "Times read from disk.", "adapter"),
            "activate": self._counter("minivllm:adapter_activations", "Times copied into a slot.", "adapter"),
            "evict": self._counter("minivllm:adapter_evictions", "Slots lost to another adapter.", "adapter"),
            "drop": self._counter("minivllm:adapter_drops", "Places in memory lost to another.", "adapter"),
        }

    def _make_histograms(self) -> None:
        def made(name: str, text: str, buckets: tuple[float, ...], label: str = "model_name") -> Histogram:
            return Histogram(name, text, [label], buckets=buckets, registry=self.registry)

        self.ttft = made("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.itl = made(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", BETWEEN_TOKENS
        )
        self.e2e = made("vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self.queued = made("vllm:request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.adapter_ttft = made(
            "minivllm:adapter_time_to_first_token_seconds",
            "From arrival to the first token, by adapter.",
            BY_ADAPTER,
            "adapter",
        )

    def label(self, name: str) -> str:
        """The label of an adapter: its own, or `other` once there are `most_labels`. A label is never given back."""
        if name not in self._labels and len(self._labels) >= self.most_labels:
            return OTHER
        self._labels.add(name)
        return name

    def serve(self, name: str) -> None:
        """Begin the counters of an adapter, at 0."""
        label = self.label(name)
        for counter in (self.requests, self.read, self.written, self.waits, *self.events.values()):
            counter.labels(label)
        self.adapter_ttft.labels(label)

    def begun(self, adapter: str) -> None:
        """The engine has taken a request of it."""
        self.requests.labels(self.label(adapter)).inc()

    def tokens(self, adapter: str, count: int, seconds: float | None) -> None:
        """So many tokens of a request came at once.

        seconds   from one to the next; None for the first ones, and where nobody has seen them come
        """
        self.generation_tokens.labels(self.model_name).inc(count)
        self.written.labels(self.label(adapter)).inc(count)
        for _ in range(0 if seconds is None else count):
            self.itl.labels(self.model_name).observe(seconds)

    def finished(self, adapter: str, output: RequestOutput) -> None:
        """A request has had its last output."""
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

    def aborted(self) -> None:
        """A request ended because nobody listens any more."""
        self.ended.labels(self.model_name, "abort").inc()

    def listen(self, engine: LLMEngine) -> None:
        """Count what happens to adapters from now on. To be called in the engine's thread."""
        if engine.adapters is not None:
            engine.adapters.manager.listeners.append(AdapterEvents(self.events, self.label))

    async def text(self, llm: AsyncLLM) -> bytes:
        """In Prometheus' format, the engine's numbers of now among them."""
        self.engine.seen = await llm.call(EngineView.of)
        return generate_latest(self.registry)
