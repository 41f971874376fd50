"""What a model declares about itself. Stands for vllm/model_executor/models/interfaces.py (v0.22.1)."""

from typing import ClassVar


class SupportsLoRA:
    """Class marker of a model whose linears may be adapted (vLLM: SupportsLoRA).

    packed_modules_mapping: a fused module's name -> the checkpoint's names for its slices, in order.
    embedding_modules: an embedding's name -> "input_embeddings" or "output_embeddings".
    """

    supports_lora: ClassVar[bool] = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}
