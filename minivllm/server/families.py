"""The metrics that a server has, by name and buckets. Stands for a part of vllm/v1/metrics/loggers.py (v0.22.1)."""

from functools import cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from minivllm.server.engine_metrics import EngineCollector
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.views import EngineView

M = TypeVar("M", Counter, Histogram)

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
BETWEEN_TOKENS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
# Fewer, since every adapter has them.
BY_ADAPTER = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)


class Families:
    """Counters and histograms in a registry of their own.

    engine   the engine's own numbers, as of the last `text`
    events   kind of an adapter's event -> its counter
    """

    def __init__(self, model_name: str) -> None:
        self.model_name, self.registry = model_name, CollectorRegistry()
        self.engine = EngineCollector(model_name)
        self.registry.register(self.engine)
        self._make_counters()
        self._make_histograms()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return with_quick_labels(Counter(name, text, labels, registry=self.registry))

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
            histogram = Histogram(name, text, [label], buckets=buckets, registry=self.registry)
            return with_quick_labels(histogram)

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

    async def text(self, llm: AsyncLLM) -> bytes:
        """In Prometheus' format, the engine's numbers of now among them."""
        self.engine.seen = await llm.call(EngineView.of)
        return generate_latest(self.registry)


def with_quick_labels(metric: M) -> M:
    """The same metric, whose labels are looked up with every event. Nobody ever takes one of them back."""
    metric.labels = cache(metric.labels)
    return metric
