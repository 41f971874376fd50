"""Who is in memory, and who is in a slot."""

from collections.abc import Iterator

from labs.demos.small import SmallModel, adapter, small_engine
from minivllm.config import LoRAConfig
from minivllm.lora.events import LoRAEvent
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import LRUCacheLoRAModelManager


def demo_5_1() -> Iterator[str]:
    cache = LRUCache[str](2)
    cache.put(1, "sql")
    cache.put(2, "json")
    cache.touch(1)
    yield f"1 and 2 are put, 1 is used: the oldest comes first, {list(cache)}"
    cache.put(3, "tone")
    yield f"3 comes: {list(cache)}"
    cache.put(4, "tool", spare={1})
    yield f"4 comes, 1 is spared: {list(cache)}"
    try:
        cache.put(5, "news", spare={1, 4})
        yield f"5 comes, both are spared: {list(cache)}"
    except RuntimeError as error:
        yield f"5 comes, both are spared: {error}"


def manager(memory: int, *known: int) -> LRUCacheLoRAModelManager:
    """Two slots; these adapters are in memory."""
    config = LoRAConfig(max_loras=2, max_cpu_loras=memory, max_lora_rank=4)
    made = LRUCacheLoRAModelManager(SmallModel(), 4, 16, 61, config, "cpu")
    for adapter_id in known:
        made.add_adapter(adapter(adapter_id, "o_proj"))
    return made


def where(tiers: LRUCacheLoRAModelManager) -> str:
    return f"in memory {list(tiers.list_adapters())}, slots {tiers.list_active_adapters()}"


def demo_5_2() -> Iterator[str]:
    tiers = manager(4, 1, 2, 3)
    for adapter_id in (1, 2, 1, 3):
        yield f"activate {adapter_id}: {tiers.activate_adapter(adapter_id)}; {where(tiers)}"
    tiers.write_slot = fail_to_copy
    for adapter_id in (2, 9):
        try:
            tiers.activate_adapter(adapter_id)
        except (ValueError, OSError) as error:
            yield f"activate {adapter_id} fails: {error}; {where(tiers)}"


def fail_to_copy(lora: object, slot: int) -> None:
    raise OSError("the copy broke off")


def demo_5_4() -> Iterator[str]:
    tiers, told = manager(3, 1, 2, 3), []
    tiers.listeners.append(lambda event: told.append(said(event)))
    tiers.activate_adapter(1)
    tiers.activate_adapter(2)
    tiers.set_in_use({1})
    for action, adapter_id in (("activate", 3), ("add", 4), ("add", 5)):
        told.clear()
        if action == "add":
            tiers.add_adapter(adapter(adapter_id, "o_proj"))
        else:
            tiers.activate_adapter(adapter_id)
        yield f"{action} {adapter_id}, 1 is in use: {', '.join(told)}; {where(tiers)}"


def said(event: LoRAEvent) -> str:
    return f"{event.kind} {event.adapter_id}"


def demo_5_7() -> Iterator[str]:
    with small_engine() as (engine, requests):
        worker, told = engine.adapters.worker, []
        worker.manager.listeners.append(lambda event: told.append(said(event)))
        for step in ((1, 2), (2, 3), (3, 1)):
            told.clear()
            worker.set_active_adapters([requests[i] for i in step], None)
            slots = worker.manager.list_active_adapters()
            yield f"a step needs {step}: {', '.join(told)}; slots {dict(sorted(slots.items()))}"
        failures = worker.prepare_adapters([requests[2], type(requests[1])("gone", 8, "/no/such/folder")])
        yield f"a folder is not there: {', '.join(f'{i} {type(e).__name__}' for i, e in failures.items())}"


def demo_5() -> Iterator[str]:
    """Ten steps: who is in each slot, what was read and copied for it, and the slots that rows are sent to."""
    history = ((1,), (1, 2), (1, 2), (2, 3), (3,), (3, 0), (1, 3), (2, 1), (2, 1), (3, 2))
    yield "two slots, memory for two adapters; + was copied into its slot in this step, > was read from disk before"
    with small_engine(max_cpu_loras=2) as (engine, requests):
        worker, told = engine.adapters.worker, []
        manager = worker.manager
        manager.listeners.append(lambda event: told.append((event.kind, event.adapter_id)))
        table, reads = [], 0
        for step in history:
            told.clear()
            worker.set_active_adapters([requests[i] for i in step], LoRAMapping(step, step))
            held = {slot: adapter_id for adapter_id, slot in manager.list_active_adapters().items()}
            marks = {i: "+" * (("activate", i) in told) + ">" * (("load", i) in told) for i in held.values()}
            cells = [f"{held[slot]}{marks[held[slot]]}" if slot in held else "." for slot in (0, 1)]
            sent = manager.punica_wrapper.token_lora_indices.tolist()
            reads += sum(kind == "load" for kind, _ in told)
            table.append((str(len(table) + 1), " ".join(map(str, step)), *cells, " ".join(map(str, sent))))
    for name, row in zip(("step", "adapters of rows", "slot 0", "slot 1", "rows are sent to"), zip(*table)):
        yield f"  {name:17}" + "".join(f"{cell:6}" for cell in row).rstrip()
    yield f"{reads} reads from disk"
