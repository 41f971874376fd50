"""Rotary position embedding. Stands for vllm/model_executor/layers/rotary_embedding (v0.22.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True)
class RopeParameters:
    """How positions become angles; `factor` stretches them (linear, llama3), the rest is Llama 3's blend.

    stretch   divides all angles, whatever the type: what an adapter for longer contexts wants
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    stretch: float = 1.0


class RotaryEmbedding(nn.Module):
    """Looks up the angles' cosines and sines, once a step for all layers (vLLM: RotaryEmbedding).

    The table, for all `max_position` positions, is computed once, in float32 whatever the model's dtype, as the
    models were trained, and kept so: a rotation is computed in float32 and rounded once.
    """

    def __init__(
        self,
        head_size: int,
        max_position: int,
        rope: RopeParameters,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_size, self.max_position, self.rope = head_size, max_position, rope
        # Computed on the CPU whatever the device, but for a model of shapes alone, which may be of any length.
        where = "meta" if device is not None and torch.device(device).type == "meta" else "cpu"
        positions = torch.arange(max_position, dtype=torch.float32, device=where)
        angles = positions[:, None, None] * inverse_frequencies(head_size, rope).to(where)  # (P, 1, D/2)
        cos, sin = angles.cos(), angles.sin()
        # The minus of rotate-half goes into the table, where it costs nothing per layer.
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, table in (("cos", torch.cat((cos, cos), -1)), ("sin", torch.cat((-sin, sin), -1))):
            self.register_buffer(name, table.to(device, dtype), persistent=False)

    def stretched(self, factor: float) -> RotaryEmbedding:
        """The same for a context `factor` times as long, every angle divided by it (linear scaling)."""
        rope = replace(self.rope, stretch=self.rope.stretch * factor)
        longest = math.ceil(self.max_position * factor)
        return RotaryEmbedding(self.head_size, longest, rope, self.cos.dtype, self.cos.device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (T,) int64 -> cos, sin: (T, 1, D), as `apply_rotary` wants them"""
        return self.cos[positions], self.sin[positions]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + D/2). x: (T, heads, D) -> (T, heads, D)"""
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def inverse_frequencies(head_size: int, rope: RopeParameters) -> torch.Tensor:
    """Radians per position of each pair: (D/2,) float32"""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)  # (D/2,)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    if rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    return frequencies / rope.stretch


def _llama3(frequencies: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """Llama 3.1: fast pairs stay, slow ones are stretched by `factor`, those between are blended."""
    wavelengths = 2 * math.pi / frequencies  # positions per turn
    turns = rope.original_max_position_embeddings / wavelengths  # within the context of the first training
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor
