"""Presets: what to set for little memory, throughput, latency, or many kinds of adapters; and what each takes.

The demo adapters have ranks of 8, 12, 16 and 32, so a preset also decides which of them it can serve.
"""

from examples.common import NAMES, adapter, make_engine
from minivllm.config import LoRAConfig, ModelConfig
from minivllm.economics import slot_memory
from minivllm.models.demo_model import demo_model_path

PRESETS = {
    # Few small slots in half precision, and few adapters in memory.
    "memory": {"max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 8, "lora_dtype": "float16"},
    # Many adapters in one batch, many more in memory, so that a switch copies instead of reading a file.
    "throughput": {"max_loras": 8, "max_cpu_loras": 64, "max_lora_rank": 32, "lora_dtype": "bfloat16"},
    # One slot: the adapter that is pinned there never waits for a copy. All other adapters are refused meanwhile.
    "latency": {"max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 16, "lora_dtype": "float16"},
    # A server whose tenants bring what they have: all ranks up to 32, and a bias on B.
    "production": {
        "max_loras": 6,
        "max_cpu_loras": 32,
        "max_lora_rank": 32,
        "lora_dtype": "bfloat16",
        "bias_enabled": True,
    },
}


def predicted_bytes(name: str) -> int:
    """What LoRA will take on a CPU, from the model's config.json, before anything is loaded."""
    architecture = ModelConfig(demo_model_path()).architecture
    return slot_memory(architecture, LoRAConfig(**PRESETS[name]), "cpu").total


def main(names: tuple[str, ...] = tuple(PRESETS)) -> dict[str, dict[str, object]]:
    told = {}
    for name in names:
        engine = make_engine(**PRESETS[name])
        served = []
        for adapter_name in NAMES:
            try:
                engine.add_lora(adapter(adapter_name))
                served.append(adapter_name)
            except ValueError as refusal:
                print(f"  {name} cannot serve {adapter_name}: {refusal}")
        if name == "latency":
            engine.pin_lora(adapter("sql").lora_int_id)
        memory = engine.debug_info()["memory"]
        told[name] = {
            "predicted": predicted_bytes(name),
            "slots": memory["device_total"],
            "adapters": memory["cpu_total"],
            "served": served,
        }
        print(
            f"{name}: slots take {memory['device_total'] / 2**20:.1f} MiB, adapters in memory "
            f"{memory['cpu_total'] / 2**20:.1f} MiB; serves {', '.join(served)}"
        )
    return told


if __name__ == "__main__":
    main()
