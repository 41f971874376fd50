"""What adapters may have beyond A and B of linears. vLLM (v0.22.1) has it inside vllm/lora/.

Brings      adapters on the embedding and the head, on experts, shared out in full between ranks
            (`fully_sharded_loras`), and in legacy/ what vLLM has dropped. It is there for what users have. Fully
            sharded, each of two ranks has 41.9 MB of an adapter of rank 16 instead of 56.6, and is slower: 5,957
            tokens a second instead of 8,924 with 32 requests on two H200 (docs/tensor-parallel.md,
            benchmarks/README.md)
Implements  of `LoRAExtensions`: `options` (each an `AdapterOption`, with a `WrappedOption` for a model that has it)
            and `sharded_wrappers`. Layers are `BaseLayerWithLoRA`. Of `EngineCore`: `limits_of`
Options     `fully_sharded_loras`; in legacy/ `bias_enabled`, `lora_extra_vocab_size`, `long_lora_scaling_factors`
Costs       some 1,100 lines, and 600 in legacy/. Embedding and head take 2 (V + H) R elements of every slot, a
            quarter of the demo model's slots at rank 32 and a tenth of Llama 3 8B's at rank 16 (docs/faq.md);
            `target_modules` leaves them out
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension
from minivllm.lora.extensions import AdapterOption
from minivllm.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.options.fully_sharded import SHARDED
from minivllm.options.legacy import LEGACY
from minivllm.options.legacy.prompts import AdapterPrompts
from minivllm.options.logits import LogitsProcessorWithLoRA
from minivllm.options.target_parameters import ExpertAdapters

if TYPE_CHECKING:
    from minivllm.parts import Parts


class EndsOfModel(AdapterOption):
    """Adapters on the input embedding and on the head."""

    wrappers = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)


def _add_to(parts: "Parts") -> None:
    parts.make_limits_of = AdapterPrompts


ADAPTER_OPTIONS: tuple[AdapterOption, ...] = (EndsOfModel(), ExpertAdapters(), *LEGACY)
OPTIONS = Extension({"options": ADAPTER_OPTIONS, "sharded_wrappers": SHARDED}, _add_to)
