"""What an engine tells of itself: records of steps, counters, a log of adapters, pictures. vLLM: vllm/v1/metrics.

Brings      `engine.trace`, `get_metrics` and `debug_info`: what every step did, whom it passed over and why, what
            passes of each size took, memory over time. The server's /metrics and its live page, the demo's page and
            the exercises' oracles read them (docs/serving.md)
Implements  `Observer`; two `listeners` of the engine's steps (`Recorder`, `History`) and two of adapters; the
            `SchedulingPolicy` of a plain order, which also notes how far down the line a step came (`WatchedLine`)
Costs       some 1,200 lines, 1,400 more of the page, and at most 64 MB: records of the last 10,000 steps. Their time
            is part of all figures of benchmarks/README.md; alone it was never measured. No decision asks any of it
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    from minivllm.observe.install import add_to

    add_to(parts)


OBSERVE = Extension(add_to=_add_to)
