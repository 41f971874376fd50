"""Options of adapters, each in a file of its own; a plain adapter enters none. vLLM: inside vllm/lora/."""

from minivllm.lora import seams
from minivllm.lora.options import bias, expert_weights, long_context, vocabulary
from minivllm.lora.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.lora.options.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.lora.options.logits import LogitsProcessorWithLoRA

__all__ = ["expert_weights"]

seams.wrappers += [
    VocabParallelEmbeddingWithLoRA,
    FusedMoEWithLoRA,
    FusedMoE3DWithLoRA,
    LogitsProcessorWithLoRA,
]
seams.model_options += [vocabulary.add_vocabulary, bias.make_room, long_context.wrap_rotaries]
seams.beside_checks.update(
    {bias.BIAS: bias.refuse_bias, vocabulary.EMBEDDINGS: vocabulary.has_been_judged}
)
