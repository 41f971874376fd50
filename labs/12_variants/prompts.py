"""Where in a prompt an adapter begins. In PEFT `calculate_alora_offsets` (peft/tuners/lora/variants.py, 0.21.2)."""

from labs.kit.overlay import Todo
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from minivllm.alora.invocation import INVOCATION
from minivllm.engine.input_processor import LimitsOf, PromptLimits
from minivllm.lora.request import LoRARequest

# Of a prompt without the tokens: the base model computes it and its answer, as in PEFT.
NEVER = sys.maxsize


class InvokedPrompts:
    """`limits_of` of `EngineCore`, with the `adapter_start` of prompts for aLoRA adapters.

    limits_of   says what else prompts may be
    """

    def __init__(self, limits_of: LimitsOf) -> None:
        self.limits_of = limits_of

    # region lab 12.1: where the adapter begins
    def __call__(
        self, base: PromptLimits, lora_request: LoRARequest, found: Mapping[str, Any]
    ) -> PromptLimits:
        """As `limits_of` says, and `adapter_start` where what was found of the adapter has tokens (INVOCATION).

        To use: `self.limits_of`, and `_replace` of what it gives (a NamedTuple). INVOCATION names the tokens among what
        was found.
        """
        raise Todo("lab 12.1: where the adapter begins")

    # endregion


# region lab 12.1: where the adapter begins
def start_of_last(tokens: Sequence[int], token_ids: Sequence[int]) -> int:
    """The position of the first of `tokens` where they occur last in a prompt; NEVER if they do not.

    Tokens of the answer are not looked at: an adapter that begins with its prompt goes on, as PEFT's `generate` has it.
    """
    raise Todo("lab 12.1: where the adapter begins")


# endregion
