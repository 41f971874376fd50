"""Performance: seconds to load, to activate, and of a forward pass by batch size; and the most memory there was.

`debug_info` has all of it, measured while requests run. Nothing has to be switched on.
"""

from examples.common import NAMES, answer_all, make_engine
from minivllm import LLMEngine


def main(engine: LLMEngine) -> dict[str, object]:
    answer_all(engine, [None])
    answer_all(engine, [*NAMES, None, None])

    info = engine.debug_info()
    lora, by_rows = info["metrics"]["lora"], info["forward_by_rows"]
    stats = {
        "avg_load_ms": 1000 * lora["load_seconds"] / lora["loads"],
        "avg_activation_ms": 1000 * lora["activate_seconds"] / lora["activations"],
        "avg_forward_ms": {rows: 1000 * told["seconds"] / told["steps"] for rows, told in by_rows.items()},
        "peak_memory_mb": {kind: peak / 2**20 for kind, peak in info["peak_memory"].items()},
    }
    print(
        f"a load takes {stats['avg_load_ms']:.1f} ms, a copy into a slot {stats['avg_activation_ms']:.1f} ms"
    )
    for rows, milliseconds in stats["avg_forward_ms"].items():
        print(f"  a forward pass of {rows} requests takes {milliseconds:.1f} ms")
    print("peaks in MB:", ", ".join(f"{kind} {peak:.0f}" for kind, peak in stats["peak_memory_mb"].items()))
    return stats


if __name__ == "__main__":
    main(make_engine())
