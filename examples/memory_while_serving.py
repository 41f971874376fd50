"""Less memory while requests run: the adapters that nobody asked for longest leave their slots, and then memory.

An engine does this by itself when it needs room (`max_loras`, `max_cpu_loras`, `eviction_policy`). Doing it by hand is
for memory that somebody else wants, and safe at any time: a running request's adapter comes back before its next step.
"""

from examples.common import GREEDY, QUESTIONS, adapter, answer_all, chat, finish, make_engine
from minivllm import LLMEngine


def reduce_active(engine: LLMEngine, target: int) -> int:
    """Take adapters out of slots until `target` are left, the least recently used first. How many went."""
    manager = engine.model_runner.lora_manager.manager
    active = [i for i in manager.list_active_adapters() if i not in engine.adapters.pinned]
    return sum(
        manager.deactivate_adapter(adapter_id) for adapter_id in active[: max(0, len(active) - target)]
    )


def shrink_memory(engine: LLMEngine, most_bytes: int) -> int:
    """Unload adapters, the least recently used first, until those in memory take so many bytes. How many went.

    `remove_lora` waits for requests in flight, so nobody loses an answer. The adapter's record goes with it: the next
    request that brings its folder registers it again.
    """
    gone = 0
    for adapter_id in engine.model_runner.lora_manager.manager.list_adapters():
        if engine.debug_info()["memory"]["cpu_total"] <= most_bytes:
            break
        gone += engine.remove_lora(adapter_id)
    return gone


def main(engine: LLMEngine) -> dict[str, object]:
    names = ["sql", "dates", "json", "bullets"]
    alone = answer_all(engine, names)
    for name in names:
        engine.add_request(name, chat(engine, QUESTIONS[name]), GREEDY, lora_request=adapter(name))
    outputs = {output.request_id: output for _ in range(3) for output in engine.step() if output.finished}

    before = engine.debug_info()["memory"]["cpu_total"]
    left = reduce_active(engine, target=1)
    outputs |= finish(engine)
    gone = shrink_memory(engine, most_bytes=before // 2)
    after = engine.debug_info()["memory"]["cpu_total"]

    same = [outputs[name].outputs[0].text for name in names] == alone
    print(
        f"{left} adapters left their slots in the middle of four answers, which are {'' if same else 'not '}the same"
    )
    print(f"{gone} left memory: {before / 2**20:.1f} MB before, {after / 2**20:.1f} after")
    return {"same": same, "left": left, "before": before, "after": after}


if __name__ == "__main__":
    main(make_engine())
