"""A report for a bug: machine, configuration, adapters, memory, counters and the last errors, in one JSON file.

Logs say when each thing happened: `--log-level debug`, or the two lines in `main`.
"""

import json
import logging
from pathlib import Path

from examples.common import ADAPTERS, NAMES, answer_all, make_engine
from minivllm import LLMEngine, LoRARequest

# What a report has, and the part of `debug_info` that it comes from.
PARTS = {
    "system_info": "system",
    "model_info": "model",
    "lora_config": "lora",
    "active_loras": "adapters",
    "memory_stats": "memory",
    "performance_metrics": "metrics",
    "error_logs": "errors",
}


def collect(engine: LLMEngine) -> dict[str, object]:
    info = engine.debug_info()
    return {part: info[name] for part, name in PARTS.items()}


def main(engine: LLMEngine, out: Path = Path("out/debug.json")) -> dict[str, object]:
    logger = logging.getLogger("minivllm.lora")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    answer_all(engine, list(NAMES[:3]))
    try:
        engine.add_lora(LoRARequest("typo", 99, str(ADAPTERS / "sqll")))
    except FileNotFoundError as error:
        print("refused, and noted:", error)
    logger.setLevel(level)

    report = collect(engine)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    for info in report["active_loras"]:
        print(f"{info['name']}: rank {info['rank']}, {info['bytes']:,} bytes, slot {info['slot']}")
    print(f"{report['error_logs']['adapters_refused']} refusals; the report is {out}")
    return report


if __name__ == "__main__":
    main(make_engine())
