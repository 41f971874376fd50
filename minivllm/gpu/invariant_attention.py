"""Attention in one order for every batch. Stands for VLLM_BATCH_INVARIANT in vllm/v1/attention/backends (v0.22.1)."""

from collections.abc import Sequence

import torch

from minivllm.config import EngineConfig
from minivllm.gpu.decode_buffers import DecodeBuffers
from minivllm.gpu.paged_attention import TiledAttentionMetadata
from minivllm.worker.model_runner import BuildAttention


class InvariantBuffers(DecodeBuffers):
    """Decodes as tiles of one token. Padding stands before position 0, and attends to nothing."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device | str) -> None:
        super().__init__(max_rows, max_blocks, block_size, device)
        self.tiles = self.decode_rows.expand(4, -1).contiguous()  # (4, B) int32
        self.tiles[2] = 1

    def attention(self, size: int, max_model_len: int) -> TiledAttentionMetadata:
        return TiledAttentionMetadata(
            self.slot_mapping[:size], self.tiles[:, :size], self.block_tables[:size]
        )

    def fill(
        self, token_ids: Sequence[int], positions: Sequence[int], block_tables: Sequence[list[int]], size: int
    ) -> None:
        super().fill(token_ids, positions, block_tables, size)
        torch.sub(self.seq_lens, 1, out=self.tiles[3])


def build_invariant_attention(config: EngineConfig) -> BuildAttention:
    """What makes the metadata of attention where `batch_invariant` is asked for; of linears see `invariant_linear`.

    Kernels for decodes cut contexts into parts by how many requests there are, and prompts have another kernel. Here
    one kernel takes all. For each query it goes through the context from its beginning, and splits nothing.
    """
    arch = config.model_config.architecture

    def build(query_lens: list[int], *rows: list) -> TiledAttentionMetadata:
        from minivllm.gpu.kernels.mixed_attention import queries_per_tile  # Triton is not everywhere

        tile_tokens = queries_per_tile(arch.num_attention_heads // arch.num_key_value_heads)
        return TiledAttentionMetadata.build(
            query_lens, *rows, config.cache_config.block_size, tile_tokens, config.device
        )

    return build
