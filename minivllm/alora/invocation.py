"""Which adapters are activated by tokens, and what of them is not served. vLLM (v0.22.1) passes the field over."""

from typing import Any

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.errors import shown
from minivllm.lora.extensions import AdapterOption, WrappedOption
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import Found, WrappedModules

# The field of adapter_config.json, and what `LoRAModel.beside` has the tokens under.
INVOCATION = "alora_invocation_tokens"

# Trained ones are a role's header or a short sentence.
MOST_TOKENS = 1024

# Fields that PEFT refuses beside it, too: "unsupported variant combination".
NOT_BESIDE = ("use_dora", "target_parameters")


class ActivatedLoRA(AdapterOption):
    """Adapters with `alora_invocation_tokens`, a list of token ids."""

    config_field = INVOCATION

    def read_config(self, tokens: Any, peft_helper: PEFTHelper) -> None:
        """Put the tokens beside a config. ValueError for what is no list of token ids, or an empty one."""
        is_list = isinstance(tokens, list) and 1 <= len(tokens) <= MOST_TOKENS
        if not is_list or any(type(token) is not int or not 0 <= token < 2**31 for token in tokens):
            raise ValueError(
                f"{INVOCATION} must be a list of 1 to {MOST_TOKENS} token ids, got {shown(tokens)}"
            )
        peft_helper.beside[INVOCATION] = tuple(tokens)

    def check_config(self, tokens: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig) -> list[str]:
        """What aLoRA is not served with, as in PEFT."""
        found = [field for field in NOT_BESIDE if peft_helper.config.get(field)]
        return [
            f"aLoRA ({INVOCATION}) is not supported with {field}; train without one of them."
            for field in found
        ]

    def wrap_model(
        self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig
    ) -> "InvocableModel":
        return InvocableModel(wrapped, getattr(model, "embedding_modules", {}), model)


class InvocableModel(WrappedOption):
    """A wrapped model, as aLoRA adapters find it.

    heads   last parts of the names of its output embeddings
    """

    def __init__(self, wrapped: WrappedModules, embedding_modules: dict[str, str], model: nn.Module) -> None:
        self.wrapped, self.model = wrapped, model
        self.heads = {name for name, kind in embedding_modules.items() if kind == "output_embeddings"}

    def judge(self, lora: LoRAModel, found: Found) -> None:
        """ValueError for tokens that the model does not have, and for adapters that are on more than linears.

        PEFT knows aLoRA on linears alone, the head among them. An adapter that adds tokens, or has a longer context,
        needs these in rows of the base model, too.
        """
        if (tokens := lora.beside.get(INVOCATION)) is None:
            return
        vocab_size = self.model.config.vocab_size
        if unknown := [token for token in tokens if token >= vocab_size]:
            raise ValueError(
                f"{INVOCATION} has {unknown[:5]}, but the model's vocabulary has {vocab_size} tokens"
            )
        if others := sorted(lora.beside.keys() - {INVOCATION}):
            raise ValueError(
                f"aLoRA ({INVOCATION}) is not supported with {', '.join(others)}, which concern all of a prompt; "
                "train without one of them"
            )
        for name in found:
            module = self.wrapped.modules[name]
            is_head = name.rpartition(".")[2] in self.heads
            if not is_head and not isinstance(module, BaseLinearLayerWithLoRA):
                kind = type(module.base_layer).__name__
                raise ValueError(
                    f"aLoRA ({INVOCATION}) is supported on linears only, and {name} is a {kind}; leave it out of "
                    "target_modules"
                )
