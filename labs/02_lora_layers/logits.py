"""Adapters on the output embedding. Stands for vllm/lora/layers/logits_processor.py (v0.22.1)."""

from labs.kit.overlay import Todo
import torch
import torch.nn.functional as F
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead
from minivllm.options.head_slots import HeadSlots


class LogitsProcessorWithLoRA(HeadSlots):
    """The way from hidden states to logits, with room for S adapters on `lm_head`. vLLM: the same name.

    It stands in the place of the logits processor, not of `lm_head`: tied to the input embedding, that one has no
    weight of its own. It sees sampled rows only, so it asks the backend for the adapters of those.
    """

    # region lab 2.9: logits with adapters
    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The base layer's logits, with each sampled row's own adapter added.   hidden_states: (P, H) -> (P, V)

        A batch without adapters (`no_lora`) is the base layer's alone. Else its `own_logits` are added to. Where they
        may add tokens there are logits for these too: `_with_added_tokens`, (P, V + X), as wide as B is tall. Where an
        adapter of this step has weights here (`reaches(slots)`), the backend adds in place what A and B give:
        `add(logits, hidden_states, slots, sample_rows(P))`. Processes share tokens out: `tp.gather_tokens` gives all.
        """
        raise Todo("lab 2.9: logits with adapters")

    def _with_added_tokens(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens that each row's adapter adds, in X columns more.   (P, V), (P, H) -> (P, V + X)

        Each is hidden state times embedding (`embeddings_tensors`). Of a token that the row's adapter does not add
        (`is_added`; base rows add none) the logit is -inf. Which slot each row has the backend says:
        `sample_slots(P)`, (P,) int64, -1 = base.

        One product with the tokens of all slots, of which each row takes its own slot's: to gather the embeddings of
        every row would move far more.
        """
        raise Todo("lab 2.9: logits with adapters")

    # endregion

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward`, as vLLM's tests call it."""
        return self.forward(lm_head, hidden_states, embedding_bias)

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """Never alone: it takes an `lm_head` beside it, see `from_layer_logits_processor`."""
        return False

    @classmethod
    def parts_in(cls, model: nn.Module, name: str, layer: nn.Module) -> list[str] | None:
        """Heads are adapted where the model's `embedding_modules` lists them."""
        is_listed = name.rpartition(".")[2] in getattr(model, "embedding_modules", {})
        return [] if is_listed and isinstance(layer, ParallelLMHead) else None

    @classmethod
    def around(
        cls, model: nn.Module, name: str, layer: ParallelLMHead, max_loras: int, lora_config: LoRAConfig
    ) -> "LogitsProcessorWithLoRA":
        """Adapters name `lm_head`, but the logits processor beside it is what is wrapped."""
        place = cls.place_of(name)
        if not hasattr(model.get_submodule(place.rpartition(".")[0]), "logits_processor"):
            raise ValueError(f"{name} cannot be wrapped for LoRA: the model has no {place}")
        return from_layer_logits_processor(model.get_submodule(place), layer, max_loras, lora_config)

    @classmethod
    def place_of(cls, name: str) -> str:
        parent, dot, _ = name.rpartition(".")
        return f"{parent}{dot}logits_processor"


def from_layer_logits_processor(
    layer: LogitsProcessor,
    lm_head: ParallelLMHead,
    max_loras: int,
    lora_config: LoRAConfig,
    model_config: object | None = None,
) -> LogitsProcessorWithLoRA:
    """The logits processor wrapped, with empty slots for adapters on `lm_head`. vLLM: the same name."""
    weight = lm_head.weight
    wrapped = LogitsProcessorWithLoRA(layer, lm_head.embedding_dim, weight.dtype, weight.device, None)
    wrapped.create_lora_weights(max_loras, lora_config, model_config)
    return wrapped
