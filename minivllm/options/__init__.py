"""Options of adapters, each in a file of its own; a plain adapter enters none. vLLM: inside vllm/lora/."""

from minivllm.lora.seams import beside_checks, model_options, wrappers
from minivllm.options import (
    bias,
    bias_tensors,
    context_length,
    expert_weights,
    fully_sharded,
    long_context,
    new_embeddings,
    sharded_experts,
    target_parameters,
    traits,
    vocabulary,
)
from minivllm.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.options.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.options.logits import LogitsProcessorWithLoRA

__all__ = [
    "bias_tensors",
    "context_length",
    "expert_weights",
    "fully_sharded",
    "new_embeddings",
    "sharded_experts",
    "target_parameters",
    "traits",
]

wrappers += [
    VocabParallelEmbeddingWithLoRA,
    FusedMoEWithLoRA,
    FusedMoE3DWithLoRA,
    LogitsProcessorWithLoRA,
]
model_options += [vocabulary.add_vocabulary, bias.make_room, long_context.wrap_rotaries]
beside_checks[bias.BIAS] = bias.refuse_bias
beside_checks.update(dict.fromkeys((vocabulary.EMBEDDINGS, vocabulary.IS_ADDED), vocabulary.has_been_judged))
