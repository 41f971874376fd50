"""How a manager comes to hold a step's adapters and no others. Stands for vllm/lora/worker_manager.py (v0.22.1)."""

from collections.abc import Callable, Mapping

from minivllm.errors import blamed_on
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LoRAModelManager
from minivllm.lora.request import LoRARequest


def keep_only(
    manager: LoRAModelManager, wanted: Mapping[int, LoRARequest], load: Callable[[LoRARequest], LoRAModel]
) -> None:
    """Load the wanted adapters that are missing, then remove all others, and activate the wanted ones.

    All loading comes first, because a bad adapter must not cost a good one its place. An error is marked with the id
    of the adapter that raised it (`blamed_on`).

    wanted   adapter id -> its request
    load     reads an adapter
    """
    held = manager.list_adapters().keys()
    loaded = []
    for adapter_id in wanted.keys() - held:
        with blamed_on(adapter_id):
            loaded.append(load(wanted[adapter_id]))
    for adapter_id in held - wanted.keys():
        manager.remove_adapter(adapter_id)
    for lora in loaded:
        manager.add_adapter(lora)
    # vLLM goes through a set, too, and its tests know the order: adapters 6, 7, 8 get slots 1, 2, 0.
    for adapter_id in set(wanted):
        with blamed_on(adapter_id):
            manager.activate_adapter(adapter_id)
