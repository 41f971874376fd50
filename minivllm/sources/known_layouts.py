"""Adapters whose files are laid out like one before: all but the numbers is known.

vLLM 0.22.1 goes through the names of every file (`from_local_checkpoint`, vllm/lora/lora_model.py).
"""

import hashlib
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch._utils import _unflatten_dense_tensors

from minivllm.lora.checks import check_modules
from minivllm.lora.limits import HEADER_BYTES
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.names import is_left_out
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.safetensors_file import find_safetensors
from minivllm.lora.scattered_reads import new_memory, read_into
from minivllm.lora.timed_patterns import PLAIN_KEY
from minivllm.lora.weights_files import files_in, find_weights_file, open_file

# Each takes a third of a megabyte for an 8B model.
MOST_LAYOUTS = 64
ALIGNMENT = 16  # bytes, as of a `SlotWriter`'s pieces

T = TypeVar("T", LoRALayerWeights, PackedLoRALayerWeights, None)


class Layout:
    """Where the numbers of an adapter lie in its file, and what is made of them. An adapter is a copy with numbers.

    start     of the first number in the file; the others follow it without gaps
    dtype     of all of them
    shapes    of each tensor in the file, in its order, on the "meta" device
    judged    the adapter as it is before it is accepted, without numbers
    accepted  the same, accepted: its tensors are those of `shapes`, and no scaling is left to fold in
    scaled    scaling other than 1 -> numbers of its B's in the file
    table     of its places in a pool of a `SlotWriter`, once there was one
    """

    def __init__(
        self, start: int, shapes: list[torch.Tensor], judged: LoRAModel, accepted: LoRAModel
    ) -> None:
        self.start, self.shapes, self.dtype = start, shapes, shapes[0].dtype
        self.judged, self.accepted = judged, accepted
        self.numbers = sum(tensor.numel() for tensor in shapes)
        self.order = {id(tensor): number for number, tensor in enumerate(shapes)}
        self.scaled: dict[float, list[int]] = {}
        for lora in judged.loras.values():
            if lora.scaling != 1:
                self.scaled.setdefault(lora.scaling, []).append(self.order[id(lora.lora_b)])
        self.largest_factor = max(map(abs, [1.0, *self.scaled]))
        self.table: torch.Tensor | None = None

    def without_numbers(self, request: LoRARequest) -> LoRAModel:
        """An adapter that was judged."""
        return _named(LoRAModel(request.lora_int_id, self.judged.rank, dict(self.judged.loras)), request)

    def with_numbers(self, request: LoRARequest, numbers: torch.Tensor) -> LoRAModel:
        """An accepted adapter, of which B is scaled here.   numbers: (`self.numbers`,) in the order of the file"""
        tensors = _unflatten_dense_tensors(numbers, self.shapes)  # views, made by one call
        for scaling, of in self.scaled.items():
            # As `B * scaling`: a number in the place of this tensor would first be rounded to B's dtype.
            torch._foreach_mul_(
                [tensors[number] for number in of], torch.tensor(scaling, dtype=torch.float64)
            )
        loras = {name: _copy(weights) for name, weights in self.accepted.loras.items()}
        for part in _parts(loras.values()):
            part.lora_a = tensors[self.order[id(part.lora_a)]]
            part.lora_b = tensors[self.order[id(part.lora_b)]]
            part.beside = {}
        lora = _named(LoRAModel(request.lora_int_id, self.accepted.rank, loras), request)
        lora.is_accepted = True
        return lora

    def are_finite(self, numbers: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether none is NaN or Inf in this dtype, nor once scaled. False, too, for some that are very large."""
        smallest, largest = (end.to(dtype).item() for end in torch.aminmax(numbers))
        return max(-smallest, largest) * self.largest_factor <= torch.finfo(dtype).max


class Header(NamedTuple):
    """nbytes: up to the first number    text_hash: of its text    size: of the file"""

    nbytes: int
    text_hash: bytes
    size: int


class KnownLayouts(AdapterSource):
    """Reads files that are laid out like one before by a dozen calls instead of thousands, around another source.

    A layout is worked out by that source's own functions, from shapes. So the interpreter's lock is free for others
    while a file is read into its last place. Whatever is unusual is left to the other source: options, other formats,
    a file that cannot be read, weights that are refused. So sentences are the same.

    Any thread may read.
    """

    def __init__(self, source: AdapterSource) -> None:
        self.source = source
        self.manager, self.reading = source.manager, source.reading
        # The one used longest ago is the first; None = unusual.
        self._layouts: dict[Hashable, Layout | None] = {}
        self._turn = Lock()

    @classmethod
    def around(cls, source: AdapterSource) -> "KnownLayouts":
        """Of a source that is one already, itself."""
        return source if isinstance(source, cls) else cls(source)

    def check(self, lora_request: LoRARequest) -> LoRAModel:
        lora = self._read_if_known(lora_request, shapes_only=True)
        return self.source.check(lora_request) if lora is None else lora

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        """As `AdapterSource.load`; staged, too, where there is a GPU."""
        started = time.perf_counter()
        if (lora := self._read_if_known(lora_request, shapes_only=False)) is None:
            return self.source.load(lora_request)
        lora.load_seconds = time.perf_counter() - started
        return lora

    def _read_if_known(self, lora_request: LoRARequest, shapes_only: bool) -> LoRAModel | None:
        if lora_request.lora_tensors is None and os.path.isdir(lora_request.lora_path):
            with suppress(Exception):  # whatever it is, the source finds it, too, and says it
                return self._read_known(lora_request, lora_request.lora_path, shapes_only)
        return None

    def _read_known(self, lora_request: LoRARequest, folder: str, shapes_only: bool) -> LoRAModel | None:
        extensions = self.manager.extensions
        helper = PEFTHelper.from_local_dir(folder, extensions=extensions)
        helper.validate_legal(self.manager.lora_config)
        path = find_weights_file(folder)
        if not _is_plain(helper) or path.suffix != ".safetensors" or files_in(folder, extensions.files):
            return None
        with open_file(path) as file:
            layout = self._layout_of(path, file, helper)
            if layout is None:
                return None
            return (
                layout.without_numbers(lora_request)
                if shapes_only
                else self._fill(layout, file, lora_request)
            )

    def _layout_of(self, path: Path, file: BinaryIO, helper: PEFTHelper) -> Layout | None:
        """None for an adapter that is not plain."""
        if (header := _header_of(file)) is None:
            return None
        of_config = helper.r, helper.lora_alpha, helper.use_rslora, helper.rank_pattern, helper.alpha_pattern
        key = header, repr(of_config)
        with self._turn:
            if key in self._layouts:
                self._layouts[key] = self._layouts.pop(key)
                return self._layouts[key]
        layout = self._work_out(path, file, header, helper)
        with self._turn:
            self._layouts[key] = layout
            if len(self._layouts) > MOST_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        return layout

    def _work_out(self, path: Path, file: BinaryIO, header: Header, helper: PEFTHelper) -> Layout | None:
        """As the source does it. ValueError for what it refuses."""
        options = dict(self.reading)
        expected, most_tensors = options.pop("expected_lora_modules"), options.pop("most_tensors")
        file.seek(0)
        stored = find_safetensors(path, file, most_tensors)
        in_order = sorted(stored, key=lambda name: stored[name].start)
        itemsize = self.manager.lora_dtype.itemsize
        sizes = {name: torch.Size(stored[name].shape).numel() for name in stored}
        if (
            any(is_left_out(name, options["skip_prefixes"]) for name in stored)
            or len({each.dtype for each in stored.values()}) != 1
            or any(size * itemsize % ALIGNMENT for size in sizes.values())
        ):
            return None
        metas = {n: torch.empty(stored[n].shape, dtype=stored[n].dtype, device="meta") for n in in_order}
        names = sorted(metas)  # in which the source goes through them
        lora = LoRAModel.from_lora_tensors(1, {n: metas[n] for n in names}, helper, "meta", **options)
        check_modules(lora.loras, sorted(expected))
        shapes = [metas[name] for name in in_order]
        if lora.beside or not _has_only(lora.loras.values(), shapes):
            return None
        judged = LoRAModel(1, lora.rank, {name: _copy(weights) for name, weights in lora.loras.items()})
        for weights in lora.loras.values():
            weights.scaling = 1  # else B would be another tensor, which nobody knows from where it came
        self.manager.wrapped.accept(lora)
        if not _has_only(lora.loras.values(), shapes):  # experts are stacked, ranks of a group have a part
            return None
        return Layout(header.nbytes, shapes, judged, lora)

    def _fill(self, layout: Layout, file: BinaryIO, lora_request: LoRARequest) -> LoRAModel | None:
        """None for numbers that the source has to judge one by one."""
        dtype, writer = self.manager.lora_dtype, self.manager.slot_writer
        nbytes = layout.numbers * dtype.itemsize
        pool = new_memory(nbytes) if writer is None else writer.take(nbytes)
        numbers = (pool if writer is None else writer.weights_in(pool)).view(dtype)[: layout.numbers]
        if layout.dtype == dtype:
            read_into(file, layout.start, numbers.view(torch.uint8))
            if not layout.are_finite(numbers, dtype):
                return None
        else:
            read = new_memory(layout.numbers * layout.dtype.itemsize)
            read_into(file, layout.start, read)
            if not layout.are_finite(read.view(layout.dtype), dtype):
                return None
            numbers.copy_(read.view(layout.dtype))
        lora = layout.with_numbers(lora_request, numbers)
        if writer is not None:
            layout.table = writer.keep(lora, pool, layout.table)
        return lora


def _is_plain(helper: PEFTHelper) -> bool:
    """Whether no option reads the config, and all keys of patterns are names: others may take long to match."""
    has_options = any(
        helper.config.get(field) not in (None, False) for field in helper.extensions.config_options
    )
    return not has_options and all(map(PLAIN_KEY.fullmatch, {**helper.rank_pattern, **helper.alpha_pattern}))


def _header_of(file: BinaryIO) -> Header | None:
    """None where it is too long, or the file too short."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if length > min(HEADER_BYTES, size - 8):
        return None
    return Header(8 + length, hashlib.sha256(file.read(length)).digest(), size)


def _named(lora: LoRAModel, request: LoRARequest) -> LoRAModel:
    lora.name = request.lora_name
    return lora


def _copy(weights: T) -> T:
    """With parts of its own. `copy.copy` takes five times as long."""
    if weights is None:
        return None
    copied = object.__new__(type(weights))
    vars(copied).update(vars(weights))
    if isinstance(weights, PackedLoRALayerWeights):
        copied.parts = [_copy(part) for part in weights.parts]
    return copied


def _parts(weights: Any) -> Iterator[LoRALayerWeights]:
    return (part for each in weights for part in each.parts if part is not None)


def _has_only(weights: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether A's and B's are these tensors and no others, each once, and nothing is beside B."""
    held = [id(tensor) for part in _parts(weights) for tensor in part.tensors]
    return sorted(held) == sorted(map(id, tensors))
