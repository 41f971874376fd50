"""Attention on a GPU, which reads the KV cache where it lies.

Stands for vllm/v1/attention/backends/triton_attn.py (v0.22.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from minivllm.config import EngineConfig
from minivllm.gpu.kernels.attention import paged_attention
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.worker.model_runner import BuildAttention

# A tile of prompts' queries has so many rows: its tokens times the query heads of one kv head. In a captured step,
# which has decodes beside prompts, half-filled tiles cost more than a context that is read once more.
PROMPT_ROWS, MIXED_ROWS = 128, 64


class QueryTiles(NamedTuple):
    """Tokens of a step, cut into tiles that one launch takes.

    places       (4, capacity) int32, as `paged_attention` wants them
    most_tokens  of a tile; of single tokens the kernel may split contexts
    """

    places: torch.Tensor
    most_tokens: int


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """Who attends to what in one step, prompts and decodes alike: all of it on the device, fit for a CUDA graph.

    slot_mapping  (T,) int64 cache slot (block * block_size + offset) each new token is written to. Padding has slot 0,
                  in the null block that is never handed out
    tiles         every token is in one, padding too
    block_tables  (P, W) int32 blocks of each request's context
    max_seq_len   no context is longer; only launch parameters depend on it
    """

    slot_mapping: torch.Tensor
    tiles: tuple[QueryTiles, ...]
    block_tables: torch.Tensor
    max_seq_len: int

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        block_size: int,
        tile_tokens: int,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
        splits_decodes: bool = True,
    ) -> PagedAttentionMetadata:
        """Rows are any mixture of decodes (query length 1) and prompt chunks, in any order.

        query_lens, seq_lens, block_tables: one per request. A block table may be longer than its context.
        tile_tokens: most tokens of a tile
        splits_decodes: whether decodes have tiles apart, of single tokens, whose contexts may be split
        max_seq_len: None = the longest context. The same number at every step keeps launches the same, so that no step
            has to wait for a kernel to be compiled
        """
        queries, contexts = np.array(query_lens), np.array(seq_lens)
        widest = -(-int(contexts.max()) // block_size)
        tables = np.array([table[:widest] + [0] * (widest - len(table)) for table in block_tables])  # (P, W)
        starts = contexts - queries
        rows = np.repeat(np.arange(len(queries)), queries)
        positions = np.arange(len(rows)) + np.repeat(starts - (np.cumsum(queries) - queries), queries)
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        found = query_tiles(queries, starts, tile_tokens)
        of_decodes = (queries[found[0]] == 1) & splits_decodes
        groups = (found[:, of_decodes], 1), (found[:, ~of_decodes], tile_tokens)
        return cls(
            torch.from_numpy(slots).to(device),
            tuple(QueryTiles(_int32(tiles, device), most) for tiles, most in groups if tiles.size),
            _int32(tables, device),
            int(contexts.max()) if max_seq_len is None else max_seq_len,
        )


def query_tiles(query_lens: np.ndarray, starts: np.ndarray, tile_tokens: int) -> np.ndarray:
    """Requests' tokens, end to end, cut into tiles of at most `tile_tokens`.

    query_lens, starts   (P,) how many each has, and the position of its first

    Returns (4, tiles), as `paged_attention` wants them.
    """
    counts = -(-query_lens // tile_tokens)
    owners = np.repeat(np.arange(len(counts)), counts)
    done = (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]) * tile_tokens
    first_rows = (np.cumsum(query_lens) - query_lens)[owners] + done
    lengths = np.minimum(query_lens[owners] - done, tile_tokens)
    return np.stack([owners, first_rows, lengths, starts[owners] + done])


def queries_per_tile(config: EngineConfig, captured: bool) -> int:
    """Tokens of a tile of a prompt's queries; two at least, because contexts of single tokens may be split."""
    arch = config.model_config.architecture
    rows = MIXED_ROWS if captured or config.model_config.batch_invariant else PROMPT_ROWS
    return max(2, rows // (arch.num_attention_heads // arch.num_key_value_heads))


def build_paged_attention(config: EngineConfig) -> BuildAttention:
    """What makes the metadata of steps that run eagerly.

    Where `batch_invariant` is asked for, all tokens of all steps are in tiles of one size: each query then goes through
    its context in the same order, whatever else is in the batch.
    """
    return partial(
        PagedAttentionMetadata.build,
        block_size=config.cache_config.block_size,
        tile_tokens=queries_per_tile(config, captured=False),
        device=config.device,
        max_seq_len=config.model_config.max_model_len,
        splits_decodes=not config.model_config.batch_invariant,
    )


def rotate_and_attend(
    heads: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    scale: float,
    attn: PagedAttentionMetadata,
    rotate: Callable[..., None] = rotary_and_cache,
) -> torch.Tensor:
    """Rotate q and k in place, write the cache, attend.

    heads: (T, Hq + 2 Hkv, D) queries, keys, values; row stride of any width -> (T, Hq * D)
    rotary: cosines and sines, (T, 1, D) each
    kv_cache: (num_blocks, block_size, 2 Hkv, D) contiguous
    rotate: rotates and writes the cache
    """
    rotate(heads, *rotary, attn.slot_mapping, kv_cache)
    q = heads[:, : heads.shape[1] - kv_cache.shape[2]]  # (T, Hq, D)
    output = q.new_empty(len(q), q.shape[1] * q.shape[2])
    for tiles, most_tokens in attn.tiles:
        paged_attention(q, kv_cache, tiles, most_tokens, attn.block_tables, attn.max_seq_len, scale, output)
    return output


def _int32(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
