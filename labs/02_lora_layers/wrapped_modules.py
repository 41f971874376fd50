"""Whole adapters into a model's wrapped layers. Stands for a part of vllm/lora/model_manager.py (v0.22.1)."""

from minivllm.labs import Todo
from minivllm.lora.checks import unmatched
from minivllm.lora.layers.accepting import Parts
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.module_wrapping import Found, ModuleWrapping

__all__ = ["Found", "WrappedModules"]


class WrappedModules(ModuleWrapping):
    """The wrapped layers of a model; routes an adapter's weights to them; judges, takes and writes all or none."""

    # region lab 2.7: a whole adapter, or nothing
    def judge(self, lora: LoRAModel) -> dict[str, Parts]:
        """Module name -> what its layer finds in the adapter (its `judge`); the adapter stays as it is.

        `claims` say which module takes what. What an option found of the whole adapter (`beside`) goes to the layers
        first, through `givers`. ValueError, worded by `unmatched` for all of them together, for names that no module
        takes: the adapter would lose those weights in silence. Layers raise their own.
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

    def accept(self, lora: LoRAModel) -> None:
        """Give an adapter's weights the form in which slots take them (`pack`), by module name; once.

        ValueError as in `judge`, before the adapter has changed. What `givers` gave to layers leaves `beside`.
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy an adapter that was accepted into one slot of every layer.

        A module for which the adapter has no weights is cleared: it would keep the last adapter's. Whatever stops the
        copy on its way, Ctrl-C included, is raised on, with the slot left empty in every layer.
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

    # endregion
