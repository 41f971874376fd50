"""vLLM's names of the arithmetic over ours. Stands for vllm/lora/punica_wrapper/ (v0.22.1)."""

from abc import ABC, abstractmethod
from operator import attrgetter
from typing import Any, Protocol

import torch

from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import LoRAMapping, slots_of
from minivllm.lora.runs_backend import RunsBackend

Stacked = tuple[torch.Tensor, ...]


class PunicaWrapperABC(ABC):
    """The arithmetic of a mixed batch, as vLLM calls it.

    Letters: T tokens, K input width, S slots, R rank of the slots, n packed slices of widths N_i, N their sum.
    All `add_*` work in place; base rows stay as they are.
    """

    @abstractmethod
    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        """Take in which adapter each row of the coming step has and which slot each adapter sits in."""

    @abstractmethod
    def add_shrink(
        self, y: torch.Tensor | Stacked, x: torch.Tensor, lora_a_stacked: Stacked, scale: float
    ) -> None:
        """y[i] = scale * x · A_iᵀ for every slice.   y: (n, T, R) float   x: (T, K)   A_i: (S, 1, R, K)"""

    @abstractmethod
    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | Stacked,
        lora_b_stacked: Stacked,
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        """y[:, slice i] += x[i] · B_iᵀ.   y: (T, >=N)   x: (n, T, R)   B_i: (S, 1, N_i, R)"""

    @abstractmethod
    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Stacked,
        lora_b_stacked: Stacked,
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """y[:, slice i] += scale * x · A_iᵀ · B_iᵀ. It adds to y; the base product is already there."""

    @abstractmethod
    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True
    ) -> None:
        """y (+)= x · Bᵀ, where x is what the tokens' rows of A hold.   y: (T, H)   x: (T, R)   B: (S, 1, H, R)"""

    @abstractmethod
    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """As `add_lora_linear`, on the sampled rows.   y: (P, V)   x: (P, H)   A: (S, 1, R, H)   B: (S, 1, V, R)"""


class Ops(Protocol):
    """A shrink and an expand alone, for rows in the form that their backend gives them."""

    def shrink(self, y: Any, x: torch.Tensor, lora_a: Stacked, scale: float, rows: Any) -> None:
        """`add_shrink` for these rows"""

    def expand(
        self, y: torch.Tensor, x: Any, lora_b: Stacked, offset: int, add_inputs: bool, rows: Any
    ) -> None:
        """`add_expand` for these rows"""


class PunicaWrapperBase(PunicaWrapperABC):
    """What all have in common: a backend of ours, and beside it a shrink and an expand alone. vLLM: the same name.

    Wrapped layers take it for the backend that it has: all that they ask for is the backend's.

    backend  what does the arithmetic of layers
    ops      what does it for vLLM's names, by the same rows
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        self.backend, self.ops = self._arithmetic(max_num_batched_tokens, max_batches, device, **kwargs)

    @abstractmethod
    def _arithmetic(
        self, max_tokens: int, max_samples: int, device: torch.device | str, **kwargs: Any
    ) -> tuple[Backend, Ops]:
        """Make the backend, and the ops beside it."""

    device = property(attrgetter("backend.device"))
    token_lora_indices = property(attrgetter("backend.token_lora_indices"))
    sampler_indices = property(attrgetter("backend.sampler_indices"))
    runs = property(attrgetter("backend.runs"))
    no_lora = property(attrgetter("backend.no_lora"))
    tables = property(attrgetter("backend.tables"))
    reaches_ends = property(attrgetter("backend.reaches_ends"))
    leaves_out_ends = property(attrgetter("backend.leaves_out_ends"))
    linear = property(attrgetter("backend.linear"))
    linear_deferred = property(attrgetter("backend.linear_deferred"))
    add = property(attrgetter("backend.add"))
    expand = property(attrgetter("backend.expand"))
    token_rows = property(attrgetter("backend.token_rows"))
    sample_rows = property(attrgetter("backend.sample_rows"))
    pair_rows = property(attrgetter("backend.pair_rows"))
    as_rows = property(attrgetter("backend.as_rows"))
    token_slots = property(attrgetter("backend.token_slots"))
    sample_slots = property(attrgetter("backend.sample_slots"))
    reaches = property(attrgetter("backend.reaches"))
    place = property(attrgetter("backend.place"))
    two_step = property(attrgetter("backend.two_step"))  # where the backend has it
    begin_step = property(attrgetter("backend.begin_step"))
    sync_slots = property(attrgetter("backend.sync_slots"))

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        self.backend.begin_step(mapping, lora_index_to_id)

    def add_shrink(
        self, y: torch.Tensor | Stacked, x: torch.Tensor, lora_a_stacked: Stacked, scale: float
    ) -> None:
        self.ops.shrink(y, x, lora_a_stacked, scale, self.token_rows(len(x)))

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | Stacked,
        lora_b_stacked: Stacked,
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        self.ops.expand(y, x, lora_b_stacked, offset_start, add_inputs, self.token_rows(len(y)))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Stacked,
        lora_b_stacked: Stacked,
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """buffer  (n, T, R) float to work in, whatever it holds; None = a new one"""
        rows = self.token_rows(len(x))
        self._both(y, x, lora_a_stacked, lora_b_stacked, scale, buffer, rows)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True
    ) -> None:
        self.ops.expand(y, x[None], (lora_b_stacked,), 0, add_inputs, self.token_rows(len(x)))

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        buffer = None if buffer is None else buffer[None]
        rows = self.sample_rows(len(x))
        self._both(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, buffer, rows)

    def _both(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a: Stacked,
        lora_b: Stacked,
        scale: float,
        buffer: torch.Tensor | None,
        rows: Any,
    ) -> None:
        if buffer is None:
            # At least in float32: what is lost between A and B is lost in every column of y.
            dtype = torch.promote_types(x.dtype, torch.float32)
            shape = len(lora_a), len(x), lora_a[0].shape[-2]
            buffer = torch.zeros(shape, dtype=dtype, device=x.device)  # (n, T, R)
        self.ops.shrink(buffer, x, lora_a, scale, rows)
        self.ops.expand(y, buffer, lora_b, 0, True, rows)


class SliceOps:
    """Slice by slice, with the ops of a backend.   backend: one for a CPU"""

    def __init__(self, backend: LoopsBackend) -> None:
        self.backend = backend

    def shrink(self, y: Any, x: torch.Tensor, lora_a: Stacked, scale: float, rows: Any) -> None:
        for plane, a in zip(y, lora_a):
            self.backend.shrink_op(x, a, plane, rows, scale)

    def expand(
        self, y: torch.Tensor, x: Any, lora_b: Stacked, offset: int, add_inputs: bool, rows: Any
    ) -> None:
        for plane, b in zip(x, lora_b):
            self.backend.expand_op(plane, b, y, rows, offset, b.shape[-2], add_inputs)
            offset += b.shape[-2]


class PunicaWrapperLoops(PunicaWrapperBase):
    """Ours, beside vLLM's."""

    def _arithmetic(
        self, max_tokens: int, max_samples: int, device: torch.device | str
    ) -> tuple[Backend, Ops]:
        backend = LoopsBackend(device)
        return backend, SliceOps(backend)


class PunicaWrapperCPU(PunicaWrapperBase):
    """vLLM: the same name."""

    def _arithmetic(
        self, max_tokens: int, max_samples: int, device: torch.device | str
    ) -> tuple[Backend, Ops]:
        backend = RunsBackend(device)
        return backend, SliceOps(backend)


def convert_mapping(
    mapping: LoRAMapping,
    lora_index_to_id: list[int | None],
    max_loras: int,
    vocab_size: int,
    extra_vocab_size: int,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Index tensors of a batch. vLLM: `convert_mapping`.

    max_loras           slots plus one: base rows count as one more slot where indices may not be negative
    vocab_size          of the base model
    extra_vocab_size    tokens that each adapter may add

    Returns
        base_indices            (T,) slot of each token, -1 = base
        sampler_indices         (P,) slot of each sampled row, -1 = base
        sampler_indices_padded  (P,) row + P * slot, base rows counted as slot max_loras - 1
        embeddings_indices      (2, T) offsets into stacked embeddings: of added tokens, of A
        indices_len             the four lengths
    """
    tokens = slots_of(mapping.index_mapping, lora_index_to_id)
    prompts = slots_of(mapping.prompt_mapping, lora_index_to_id)
    base_indices = torch.tensor(tokens, dtype=torch.long, device=device)  # (T,)
    sampler_indices = torch.tensor(prompts, dtype=torch.long, device=device)  # (P,)

    padded = torch.where(sampler_indices < 0, max_loras - 1, sampler_indices)
    rows = torch.arange(len(prompts), device=device)
    sampler_indices_padded = rows + padded * len(prompts)  # (P,)

    embedding_slots = base_indices.clamp(min=0)
    embeddings_indices = torch.stack(
        [embedding_slots * extra_vocab_size, embedding_slots * (vocab_size + extra_vocab_size)]
    )  # (2, T)
    lengths = [len(tokens), len(prompts), len(prompts), len(tokens)]
    return base_indices, sampler_indices, sampler_indices_padded, embeddings_indices, lengths
