"""A monitor of adapters: how often a request found its adapter in a slot, who was evicted, and memory over time.

The engine counts all of it anyway (`LoRAStats`); a monitor of one's own adds what is one's own, here the request.
"""

from examples.common import GREEDY, QUESTIONS, adapter, chat, finish, make_engine
from minivllm import LLMEngine


class LoRAMonitor:
    """Notes for each request whether its adapter is in a slot already.   lora_manager: of an engine, read only"""

    def __init__(self, lora_manager: object) -> None:
        self.lora_manager = lora_manager
        self.hits: list[bool] = []
        self.megabytes: list[float] = []

    def log_request(self, lora_id: int) -> None:
        self.hits.append(lora_id in self.lora_manager.list_active_adapters())
        self.megabytes.append(self.lora_manager.get_memory_stats()["cpu_total"] / 2**20)

    def get_stats(self) -> dict[str, float]:
        return {
            "hit_rate": sum(self.hits) / len(self.hits),
            "avg_memory_mb": sum(self.megabytes) / len(self.megabytes),
            "evictions": self.lora_manager.stats.evictions,
        }


def main(engine: LLMEngine) -> dict[str, float]:
    monitor = LoRAMonitor(engine.model_runner.lora_manager.manager)
    evictions = monitor.lora_manager.stats.evictions
    for number, name in enumerate(["sql", "sql", "dates", "sql", "json", "sql", "bullets", "dates"]):
        lora_request = adapter(name)
        monitor.log_request(lora_request.lora_int_id)
        engine.add_request(str(number), chat(engine, QUESTIONS[name]), GREEDY, lora_request=lora_request)
        finish(engine)
    stats = monitor.get_stats()
    stats["evictions"] -= evictions
    print(
        f"hit rate {stats['hit_rate']:.0%}, {stats['evictions']} evictions, {stats['avg_memory_mb']:.1f} MB on average"
    )
    return stats


if __name__ == "__main__":
    main(make_engine())
