"""What a block computes around its linears: norms, rotary and cache, residual, activation. Not attention itself."""

from collections.abc import Callable

import torch

from benchmarks.options import model_folder
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.attention import Attention
from minivllm.layers.norm import RMSNorm
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
        """The block with these linears: qkv, o, gate_up and down, which may leave work to who reads their output."""
        config = self.config
        norms = [RMSNorm(config.hidden_size, config.rms_norm_eps, *self.kinds) for _ in range(2)]
        activation = SiluAndMul()
        attention = Attention(
            config.num_attention_heads, config.head_dim, config.head_dim**-0.5, config.num_key_value_heads
        )
        readers = {"o": norms[0], "gate_up": activation, "down": norms[1]}
        if not config.qk_norm:
            readers["qkv"] = attention
        for name, reader in readers.items():
            if hasattr(linears[name], "tell_reader"):
                linears[name].tell_reader(reader)

        def run() -> torch.Tensor:
            heads = linears["qkv"](self.x).unflatten(1, (-1, config.head_dim))  # (T, Hq + 2 Hkv, D)
            rotate, attention.rest = attention.rest or rotary_and_cache, None
            rotate(heads, *self.rotary, self.slots, self.cache)
            normed, _ = norms[0](linears["o"](self.attended), self.residual)  # (T, H)
            normed, _ = norms[1](linears["down"](activation(linears["gate_up"](normed))), self.residual)
            return normed

        return run
