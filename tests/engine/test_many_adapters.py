"""What thousands of registered adapters cost: at the door, at a request's end, and in memory when they are idle."""

import gc
import tracemalloc

import pytest

from minivllm import SamplingParams
from minivllm.lora.request import LoRARequest
from minivllm.lora.tiers import same_event
from minivllm.observe import recorder
from tests.worlds.small import SmallWorld


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SmallWorld(tmp_path_factory.mktemp("many"))


def serve(engine, small, adapter_ids):
    """One request of each, one after the other; all have weights of one folder, by links of their own."""
    source = small.request(1).lora_path
    for adapter_id in adapter_ids:
        link = small.folder / f"a-link-to-adapter-{adapter_id}"
        if not link.exists():
            link.symlink_to(source)
        lora_request = LoRARequest(f"adapter-{adapter_id}", adapter_id, str(link))
        params = SamplingParams(max_tokens=1, temperature=0)
        engine.add_request(f"request-{adapter_id}", [3, 4], params, lora_request=lora_request)
        while engine.has_unfinished_requests():
            engine.step()


class NotWalked(dict):
    """A dict that may be asked, and not walked through."""

    def __iter__(self):
        raise AssertionError("all registered adapters were walked through")

    keys = values = items = __iter__


def test_a_request_comes_is_served_and_goes_without_a_walk_through_the_adapters(small):
    engine = small.engine()
    serve(engine, small, range(1, 7))
    registry = engine.adapters
    registry.adapters, registry.by_name = NotWalked(registry.adapters), NotWalked(registry.by_name)
    stats = registry.manager.stats
    stats.by_adapter = NotWalked(stats.by_adapter)

    serve(engine, small, range(1, 9))  # known ones, evicted ones, and two new ones
    engine.add_request("by name", [3], SamplingParams(max_tokens=9), lora_request="adapter-2")
    engine.step()
    engine.pin_lora(3)
    engine.remove_lora(2)
    engine.abort_request("by name")
    engine.step()

    assert 2 not in registry.adapters
    assert 3 in registry.pinned


def kept_for_each(engine, small, adapter_ids):
    """Bytes that serving these adapters left behind, for each of them, and where most of it was allocated."""
    libraries = [
        tracemalloc.Filter(False, f"*/{name}")
        for name in ("weights_files.py", "test_many_adapters.py", "tracemalloc.py")
    ]
    gc.collect()
    before = tracemalloc.take_snapshot().filter_traces(libraries)

    serve(engine, small, adapter_ids)
    for cached in (recorder._trace_row, recorder._trace_skip, same_event):
        cached.cache_clear()
    engine.adapters.manager.stats.drain_events()  # the last 10,000 are kept, whoever they are of
    gc.collect()
    after = tracemalloc.take_snapshot().filter_traces(libraries)
    grown = after.compare_to(before, "lineno")
    return sum(entry.size_diff for entry in grown) / len(adapter_ids), "\n".join(map(str, grown[:5]))


@pytest.mark.nightly
def test_of_an_adapter_evicted_long_ago_a_kilobyte_is_kept(small):
    """Its id, name, path and counters. What its reading leaves behind in libraries is not counted here.

    What a library keeps once, whenever it is first used, falls into one of two windows, and so does what the engine
    lets go of by and by, such as a table that shrinks: the smaller one may keep a kilobyte, the larger one must see
    some.
    """
    engine = small.engine()
    engine.trace.capacity = 1
    tracemalloc.start()
    serve(engine, small, range(100, 250))

    windows = [kept_for_each(engine, small, range(first, first + 150)) for first in (1000, 2000)]
    tracemalloc.stop()

    (least, where), (most, _) = sorted(windows)
    assert least < 1024, f"{least:.0f} bytes for each of 150 adapters:\n{where}"
    assert most > 200
    assert len(engine.adapters.adapters) == 450


def test_adapters_that_are_read_again_and_again_leave_no_object_behind(small):
    """But the trace's records and the last events, both of which have a limit."""
    engine = small.engine(max_loras=2, max_cpu_loras=2)
    engine.listeners.clear()
    counts = []

    for _ in range(4):
        serve(engine, small, 10 * [1, 2, 3, 4, 5, 6])
        engine.adapters.manager.stats.drain_events()
        gc.collect()
        counts.append(len(gc.get_objects()))

    assert engine.get_metrics()["lora"]["loads"] == 4 * 60
    assert counts[-1] - counts[-2] < 20, f"{counts}: 60 were read between the last two"
