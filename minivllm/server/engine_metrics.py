"""Prometheus metrics of the engine: gauges of its scheduler, and counters of what happens to adapters.

Stands for a part of vllm/v1/metrics/loggers.py (v0.22.1).
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minivllm.lora.events import LoRAEvent
from minivllm.serving.calls import EngineSnapshot

# Name, field of `SchedulerStats`, help text.
GAUGES = (
    ("vllm:num_requests_running", "num_running_reqs", "Requests in the batch."),
    ("vllm:num_requests_waiting", "num_waiting_reqs", "Requests in the queue."),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "Share of the KV cache in use; 1 is all of it."),
)
TOTALS = (
    ("vllm:num_preemptions", "num_preemptions", "Requests that lost their KV blocks and waited again."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens that the prefix cache had."),
)
LORA_GAUGES = (
    ("minivllm:adapters_known", "known", "Adapters that requests may name without being looked for."),
    ("minivllm:adapters_in_memory", "in_memory", "Adapters that are in memory."),
    ("minivllm:adapters_in_slots", "in_slots", "Adapters that have a slot."),
)


class EngineCollector:
    """A collector of prometheus_client.   latest: the snapshot that it shows, set before each `collect`"""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.latest: EngineSnapshot | None = None

    def collect(self) -> Iterator[Metric]:
        if (latest := self.latest) is None:
            return
        of_scheduler = partial(getattr, latest.scheduler)
        for kind, table, value_of in (
            (GaugeMetricFamily, GAUGES, of_scheduler),
            (CounterMetricFamily, TOTALS, of_scheduler),
            (GaugeMetricFamily, LORA_GAUGES if latest.adapters else (), latest.adapters.get),
        ):
            for name, field, text in table:
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self.model_name], value_of(field))
                yield family
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that have requests.", labels=labels)
        info.add_metric(
            [str(latest.max_loras), ",".join(latest.running), ",".join(latest.waiting)], time.time()
        )
        yield info


class AdapterEvents:
    """A listener of adapters' events that counts them by adapter.

    counters   kind of event -> a counter with the label `adapter`
    label      an adapter's name -> its label
    """

    def __init__(self, counters: dict[str, Counter], label: Callable[[str], str]) -> None:
        self.counters, self.label = counters, label
        self._names: dict[int, str] = {}  # by id, of adapters that were loaded

    def __call__(self, event: LoRAEvent) -> None:
        if event.kind == "load":
            self._names[event.adapter_id] = event.name
        if event.kind in self.counters and event.adapter_id in self._names:
            self.counters[event.kind].labels(self.label(self._names[event.adapter_id])).inc()
        if event.kind == "forget":
            self._names.pop(event.adapter_id, None)
