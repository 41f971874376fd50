"""What a model declares about itself. Stands for vllm/model_executor/models/interfaces.py (v0.22.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class WeightsMapper:
    """How a checkpoint's names become ours (vLLM: WeightsMapper, of models/utils.py).

    Each rule replaces one occurrence: of a piece anywhere, then of a beginning, then of an end. None for the new
    name drops what the rule fits.
    """

    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)

    def _map_name(self, name: str) -> str | None:
        """Our name for a checkpoint's, or None for what is not to be read."""
        for old, new in self.orig_to_new_substr.items():
            if old in name:
                if new is None:
                    return None
                name = name.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            if name.startswith(old):
                if new is None:
                    return None
                name = new + name.removeprefix(old)
        for old, new in self.orig_to_new_suffix.items():
            if name.endswith(old):
                if new is None:
                    return None
                name = name.removesuffix(old) + new
        return name


class SupportsLoRA:
    """Class marker of a model whose linears may be adapted (vLLM: SupportsLoRA).

    packed_modules_mapping: a fused module's name -> the checkpoint's names for its slices, in order.
    embedding_modules: an embedding's name -> "input_embeddings" or "output_embeddings".
    expert_params_mapping: the checkpoint's names for an expert's w1 (gate), w2 (down) and w3 (up); () for a
        dense model (vLLM: get_expert_mapping).
    is_3d_moe_weight: whether adapters have w1 and w3 of all experts in one, gate_up_proj, with one A.
    hf_to_vllm_mapper: how names of a checkpoint, and of an adapter for it, become ours; None where they are.
    """

    supports_lora: ClassVar[bool] = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}
    expert_params_mapping: ClassVar[tuple[str, ...]] = ()
    is_3d_moe_weight: ClassVar[bool] = False
    hf_to_vllm_mapper: ClassVar[WeightsMapper | None] = None
