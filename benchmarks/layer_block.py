"""What a block computes around its linears: norms, rotary and cache, residual, activation. Not attention itself."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.options import model_folder
from minivllm.gpu.fused import FusedRMSNorm, FusedSiluAndMul
from minivllm.gpu.fused.blocks import AddAndNorm, Pending, activate
from minivllm.gpu.kernels.adapted_rotary_op import adapted_rotary
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.gpu.kernels.update import DeferredUpdate
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import ONE_RANK
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.config import ModelArchitecture

BLOCK_SIZE = 16

Run = Callable[[torch.Tensor], torch.Tensor]


class Block:
    """One transformer block of T tokens on a GPU, as the engine computes it, but for the attention.

    What attention gives is a fixed tensor: it is the same for every implementation of the linears. So is what q, k and
    v are made of. The block ends with the norm that the next one begins with, which reads what down gives.
    """

    def __init__(self, model: str, tokens: int, like: torch.Tensor) -> None:
        self.config = ModelArchitecture.from_folder(model_folder(model))
        config, kinds = self.config, (like.dtype, like.device)
        self.kinds = kinds
        rotary = RotaryEmbedding(config.head_dim, tokens, config.rope_parameters, *kinds)
        self.rotary = rotary(torch.arange(tokens, device=like.device))
        self.slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + tokens, device=like.device)
        cache = 2 + tokens // BLOCK_SIZE, BLOCK_SIZE, 2 * config.num_key_value_heads, config.head_dim
        self.cache = like.new_empty(cache)
        self.x, self.residual = (torch.randn(tokens, config.hidden_size).to(like) for _ in range(2))
        self.attended = torch.randn(tokens, config.num_attention_heads * config.head_dim).to(like)

    def around(self, linears: dict[str, Run]) -> Callable[[], torch.Tensor]:
        """The block with these linears: qkv, o, gate_up and down, which may leave adapters to the kernel behind."""
        config = self.config
        norms = [
            FusedRMSNorm(RMSNorm(config.hidden_size, config.rms_norm_eps, *self.kinds)) for _ in range(2)
        ]
        activation, add_and_norm = FusedSiluAndMul(), AddAndNorm(ONE_RANK)

        def run() -> torch.Tensor:
            qkv, update = deferred(linears["qkv"], self.x)
            if update is not None and config.qk_norm:  # norms would read it first
                update.add_to(qkv)
                update = None
            rotate = rotary_and_cache
            if update is not None:
                rotate = partial(adapted_rotary, update.update, tiles=update.tiles)
            rotate(qkv.unflatten(1, (-1, config.head_dim)), *self.rotary, self.slots, self.cache)
            normed = add_and_norm(Pending(*deferred(linears["o"], self.attended)), self.residual, norms[0])
            activated = activate(activation, *deferred(linears["gate_up"], normed))  # (T, I)
            return add_and_norm(Pending(*deferred(linears["down"], activated)), self.residual, norms[1])

        return run


def deferred(linear: Run, x: torch.Tensor) -> tuple[torch.Tensor, DeferredUpdate | None]:
    """A linear's output, and what adapters still have to add to it; None = nothing."""
    return linear.deferred(x) if hasattr(linear, "deferred") else (linear(x), None)
