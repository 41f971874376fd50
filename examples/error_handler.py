"""Errors: what a server does when an adapter cannot be loaded, when a slot is missing, and when memory is short.

Every refusal is one sentence that names the adapter, the value and the option to change; it comes before anything has
changed, so the engine goes on serving. Only what no retry can mend is told to the user.
"""

from pathlib import Path

from examples.common import ADAPTERS, adapter, answer_all, make_engine
from minivllm import LLMEngine, LoRARequest


class LoRAErrorHandler:
    """Loads an adapter, or says why not and what to do."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine

    def load(self, lora_request: LoRARequest) -> str:
        """ "ready", "wait" if somebody has to make room, or the sentence for whoever sent the adapter."""
        try:
            self.engine.add_lora(lora_request)
        except FileNotFoundError as error:  # no folder, no config, no weights
            return f"missing: {error}"
        except ValueError as error:  # damaged, or trained for another model, or above max_lora_rank
            return f"unfit: {error}"
        except RuntimeError:  # all that memory holds is pinned or in use
            return "wait"
        return "ready"

    def make_room(self) -> int:
        """Memory is short: drop the adapters that no request uses and that are not pinned. How many went."""
        manager = self.engine.model_runner.lora_manager.manager
        idle = [i for i in manager.list_adapters() if i not in self.engine.adapters.pinned | manager.in_use]
        return sum(self.engine.remove_lora(adapter_id) for adapter_id in idle)


def main(engine: LLMEngine, folder: Path = Path("out")) -> dict[str, str]:
    handler = LoRAErrorHandler(engine)
    truncated = folder / "truncated"
    truncated.mkdir(parents=True, exist_ok=True)
    for name, size in (("adapter_config.json", None), ("adapter_model.safetensors", 5_000)):
        (truncated / name).write_bytes((ADAPTERS / "sql" / name).read_bytes()[:size])

    told = {
        "fine": handler.load(adapter("sql")),
        "missing": handler.load(LoRARequest("typo", 90, str(ADAPTERS / "sqll"))),
        "damaged": handler.load(LoRARequest("truncated", 91, str(truncated))),
    }
    for case, sentence in told.items():
        print(f"{case}: {sentence}")
    print(f"{handler.make_room()} adapters dropped to make room; sql comes back when it is asked for:")
    told["again"] = answer_all(engine, ["sql"])[0]
    print(told["again"])
    return told


if __name__ == "__main__":
    main(make_engine())
