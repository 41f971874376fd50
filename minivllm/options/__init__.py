"""What adapters may have beyond A and B of linears: `OPTIONS`, and `SHARDED_WRAPPERS` for `fully_sharded_loras`.

A plain adapter enters none of it. vLLM (v0.22.1) has it inside vllm/lora/.
"""

from minivllm.engine.extension import Extension, Parts
from minivllm.lora.extensions import AdapterOption
from minivllm.options.bias import LoRABias
from minivllm.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.options.fully_sharded import SHARDED
from minivllm.options.logits import LogitsProcessorWithLoRA
from minivllm.options.long_context import LongContext
from minivllm.options.target_parameters import ExpertAdapters
from minivllm.options.traits import TraitsReader
from minivllm.options.vocabulary import AddedTokens


class EndsOfModel(AdapterOption):
    """Adapters on the input embedding and on the head."""

    wrappers = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)


def _add_to(parts: Parts) -> None:
    parts.make_traits_reader = TraitsReader


ADAPTER_OPTIONS: tuple[AdapterOption, ...] = (
    EndsOfModel(),
    ExpertAdapters(),
    AddedTokens(),
    LoRABias(),
    LongContext(),
)
OPTIONS = Extension({"options": ADAPTER_OPTIONS, "sharded_wrappers": SHARDED}, _add_to)
