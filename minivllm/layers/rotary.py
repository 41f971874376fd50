"""Rotary position embedding. Stands for vllm/model_executor/layers/rotary_embedding (v0.22.1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Looks up the angles' cosines and sines, once a step for all layers (vLLM: RotaryEmbedding).

    rope_parameters   rope_type, rope_theta and whatever else the type needs, as `ModelArchitecture` has them
    stretch           divides all angles, whatever the type: what an adapter for longer contexts wants

    The table, for all `max_position` positions, is computed once, in float32 whatever the model's dtype, as the
    models were trained, and kept so: a rotation is computed in float32 and rounded once.
    """

    def __init__(
        self,
        head_size: int,
        max_position: int,
        rope_parameters: dict[str, Any],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stretch: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_size, self.max_position = head_size, max_position
        self.rope_parameters, self.stretch = rope_parameters, stretch
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        if device is not None and torch.device(device).type == "meta":
            # A model of shapes alone may be of any length. Arithmetic without values begins with a second's imports.
            cos, sin = torch.empty(2, max_position, 1, head_size, dtype=dtype, device=device)
        else:
            cos, sin = (table.to(device, dtype) for table in self._tables())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (P, 1, D) each; on the CPU, whatever the device."""
        frequencies, length = inverse_frequencies(self.head_size, self.rope_parameters)
        positions = torch.arange(self.max_position, dtype=torch.float32, device="cpu")
        angles = positions[:, None, None] * (frequencies / self.stretch)  # (P, 1, D/2)
        cos, sin = angles.cos() * length, angles.sin() * length
        # The minus of rotate-half goes into the table, where it costs nothing per layer.
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def stretched(self, factor: float) -> RotaryEmbedding:
        """The same for a context `factor` times as long, every angle divided by it (linear scaling)."""
        longest, stretch = math.ceil(self.max_position * factor), self.stretch * factor
        return RotaryEmbedding(
            self.head_size, longest, self.rope_parameters, self.cos.dtype, self.cos.device, stretch
        )

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (T,) int64 -> cos, sin: (T, 1, D), as `apply_rotary` wants them"""
        return self.cos[positions], self.sin[positions]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + D/2). x: (T, heads, D) -> (T, heads, D)"""
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def inverse_frequencies(head_size: int, rope_parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair: (D/2,) float32; and the length that "yarn" gives rotated vectors."""
    if rope_parameters["rope_type"] == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return 1.0 / rope_parameters["rope_theta"] ** exponents, 1.0  # (D/2,)
    # Imported where it is needed: it takes half a second, and most models do without.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

    config = RotaryEmbeddingConfigMixin()
    config.rope_parameters = dict(rope_parameters)
    config.max_position_embeddings = rope_parameters["original_max_position_embeddings"]
    config.hidden_size, config.num_attention_heads = head_size, 1
    return ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](config)
