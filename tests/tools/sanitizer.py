"""Which program of a launch touched what, and which of two accesses is sure to come first.

Two programs are in order only through an atomic: what one did before it released a place comes before what another
does after it acquired that place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.device import DEVICE

Place = tuple[int, int, int]  # of a program in the grid


class Access(NamedTuple):
    """One load, store or atomic of one program.

    period  how often the program had released something before
    seen    program -> the last of its periods that surely came before this
    """

    program: Place
    kind: Literal["read", "write", "change"]
    addresses: np.ndarray
    period: int
    seen: dict[Place, int]

    def comes_before(self, later: Access) -> bool:
        return later.seen.get(self.program, -1) >= self.period

    def clashes_with(self, other: Access) -> bool:
        return self.program != other.program and {self.kind, other.kind} not in ({"read"}, {"change"})


@dataclass
class Programs:
    """The programs of one launch, in the order in which they run.   accesses: all of them, likewise"""

    accesses: list[Access] = field(default_factory=list)
    now: Place = (0, 0, 0)
    released: dict[int, dict[Place, int]] = field(
        default_factory=dict
    )  # address -> what its releases had seen
    _period: int = 0
    _seen: dict[Place, int] = field(default_factory=dict)
    _unsettled: list[np.ndarray] = field(default_factory=list)  # written since the last barrier

    def begin(self, program: Place) -> None:
        self.now, self._period, self._seen, self._unsettled = program, 0, {}, []

    def barrier(self) -> None:
        self._unsettled = []

    def note(self, kind: Literal["read", "write", "change"], addresses: np.ndarray, order: str | None) -> str:
        """What is wrong with it among the program's own threads; "" if nothing is.

        order  of an atomic, as Triton names it
        """
        self.accesses.append(Access(self.now, kind, addresses, self._period, self._seen))
        if kind != "change" and any(np.isin(addresses, written).any() for written in self._unsettled):
            return f"{kind}s what its other threads have written, and no barrier is between"
        if kind == "write":
            self._unsettled.append(addresses)
        if kind == "change":
            if order in ("RELEASE", "ACQUIRE_RELEASE") and self._unsettled:
                return "releases what its other threads have written, and no barrier is between"
            self._synchronise(addresses.tolist(), order)
        return ""

    def _synchronise(self, addresses: list[int], order: str | None) -> None:
        if order in ("ACQUIRE", "ACQUIRE_RELEASE"):
            for address in addresses:
                self._seen = _later(self._seen, self.released.get(address, {}))
        if order in ("RELEASE", "ACQUIRE_RELEASE"):
            mine = {**self._seen, self.now: self._period}
            for address in addresses:
                self.released[address] = _later(self.released.get(address, {}), mine)
            self._period += 1


def _later(one: dict[Place, int], other: dict[Place, int]) -> dict[Place, int]:
    return {program: max(one.get(program, -1), other.get(program, -1)) for program in one | other}


def first_race(
    accesses: list[Access], may: list[Callable[[np.ndarray], np.ndarray]]
) -> tuple[Access, Access, int] | None:
    """Two accesses of unlike programs to one address, one of them a write, that nothing orders; and the address.

    may  which addresses may be raced for
    """
    changes = [access.addresses for access in accesses if access.kind != "read" and access.addresses.size]
    if not changes:
        return None
    written = np.unique(np.concatenate(changes))
    for ordinary in may:
        written = written[~ordinary(written)]
    programs = {program: i for i, program in enumerate({access.program: None for access in accesses})}
    addresses = np.concatenate([access.addresses for access in accesses])
    which = np.repeat(np.arange(len(accesses)), [len(access.addresses) for access in accesses])
    matters = np.isin(addresses, written)
    addresses, which = addresses[matters], which[matters]
    if not len(addresses):
        return None
    order = np.lexsort((which, addresses))
    addresses, which = addresses[order], which[order]
    who = np.array([programs[access.program] for access in accesses])[which]
    starts = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1]])
    several = np.minimum.reduceat(who, starts) != np.maximum.reduceat(who, starts)
    seen = set()
    for i in np.flatnonzero(several):
        end = starts[i + 1] if i + 1 < len(starts) else len(which)
        together = tuple(dict.fromkeys(which[starts[i] : end].tolist()))
        if together in seen:  # most addresses have the same story
            continue
        seen.add(together)
        if pair := _unordered([accesses[j] for j in together]):
            return *pair, int(addresses[starts[i]])
    return None


def _unordered(story: list[Access]) -> tuple[Access, Access] | None:
    for j, later in enumerate(story):
        for earlier in story[:j]:
            if earlier.clashes_with(later) and not earlier.comes_before(later):
                return earlier, later
    return None


ORIGIN = "made from"  # a pointer's attribute: the number of its tensor


class Strayed(AssertionError):
    """A lane outside the tensor that its pointer was made from."""


class Raced(AssertionError):
    """What a launch leaves depends on the order of its programs or lanes."""


class Region:
    """The bytes of one tensor's elements, without what lies between its rows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.size = tensor, tensor.element_size()
        self.start = tensor.data_ptr()
        pairs = [(n, step) for n, step in zip(tensor.shape, tensor.stride()) if step]
        span = 1 + sum((n - 1) * step for n, step in pairs) if tensor.numel() else 0
        inside = torch.zeros(span, dtype=torch.bool)
        if span:
            inside.as_strided([n for n, _ in pairs], [step for _, step in pairs]).fill_(True)
        self.inside = inside.numpy()

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        """Which of them are the first byte of an element.   addresses: (lanes,) uint64 -> bool"""
        offset = addresses.astype(np.int64) - self.start
        place = offset // self.size
        near = (place >= 0) & (place < len(self.inside)) & (offset % self.size == 0)
        if not near.any():
            return near
        return near & self.inside[np.where(near, place, 0)]


@dataclass
class Sanitizer:
    """Watches every launch inside `watching()`.

    reach    tensors that kernels find by addresses in tables, or through a pointer to a part of them
    common   tensors of which any lane may write any element, and the last one to write it wins
    late     tensors that the kernel ahead may still write when one with OVERLAP begins: until it has waited
    seed     order of the programs, None = as the interpreter has it
    kernels  names of those launched
    """

    reach: list[torch.Tensor] = field(default_factory=list)
    common: list[torch.Tensor] = field(default_factory=list)
    late: list[torch.Tensor] = field(default_factory=list)
    seed: int | None = None
    kernels: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[Sanitizer]:
        """Raises `Strayed` before a strayed lane is read or written, `Raced` at the end of a launch.

        On a GPU nothing is watched.
        """
        if DEVICE == "cuda":
            yield self
            return
        with pytest.MonkeyPatch.context() as patch:
            _Watch(self, patch)
            yield self


class _Watch:
    """Stands between the interpreter and memory."""

    def __init__(self, sanitizer: Sanitizer, patch: pytest.MonkeyPatch) -> None:
        self.sanitizer, self.fault = sanitizer, None
        self.regions: list[Region] = []
        self.programs = Programs()
        builder = interpreter.interpreter_builder
        for name in (
            *("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"),
            *("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_bitcast"),
            *("create_barrier", "create_select", "set_grid_idx"),
        ):
            stand_in = getattr(self, name, self._follow)
            patch.setattr(builder, name, _around(getattr(builder, name), stand_in))
        patch.setattr(interpreter, "_implicit_cvt", _around(interpreter._implicit_cvt, self.take_argument))
        patch.setattr(tl.extra.cuda, "gdc_wait", self.wait)
        executor = interpreter.GridExecutor
        patch.setattr(executor, "__call__", _around_method(executor.__call__, self.launch))

    # ---- launches -------------------------------------------------------------------------------------------

    def launch(self, executor: Any, run: Any, *args: Any, **kwargs: Any) -> None:
        self.kernel = executor.fn.__name__
        known = {k: v for k, v in kwargs.items() if k in executor.arg_names}
        self.arguments = inspect.getcallargs(executor.fn, *args, **known)
        self.sanitizer.kernels.append(self.kernel)
        self.regions, self.fault = [], None
        self.programs, self.order = Programs(), None
        self.waited, self.began = not self.arguments.get("OVERLAP"), False
        try:
            run(executor, *args, **kwargs)
            self.end_program()
        except interpreter.InterpreterError as error:
            raise self.fault or error from None
        if race := first_race(self.programs.accesses, [Region(t).holds for t in self.sanitizer.common]):
            first, second, address = race
            raise Raced(
                f"{self.kernel}: program {first.program} {first.kind}s and program {second.program} "
                f"{second.kind}s {self._where(address)}, and nothing orders the two"
            )

    def take_argument(self, convert: Any, arg: Any) -> Any:
        converted = convert(arg)
        if hasattr(arg, "data_ptr"):
            converted.handle.set_attr(ORIGIN, len(self.regions))
            self.regions.append(Region(arg))
        return converted

    def wait(self) -> None:
        self.waited = True

    def end_program(self) -> None:
        """What comes after a kernel relies on that each of its programs has waited."""
        if not self.waited:
            self._fail(Raced(f"{self.kernel}, program {self.programs.now}: ends and has not waited"))
        self.waited = not self.arguments.get("OVERLAP")

    def set_grid_idx(self, begin: Any, x: int, y: int, z: int) -> None:
        """The next program: another one than the interpreter's, if they are shuffled."""
        if self.began:
            self.end_program()
        self.began = True
        sizes = interpreter.interpreter_builder.grid_dim
        if self.sanitizer.seed is not None:
            if self.order is None:
                self.order = np.random.default_rng(self.sanitizer.seed).permutation(int(np.prod(sizes)))
            place = np.ravel_multi_index((x, y, z), sizes)
            x, y, z = (int(i) for i in np.unravel_index(self.order[place], sizes))
        self.programs.begin((x, y, z))
        begin(x, y, z)

    # ---- pointers -------------------------------------------------------------------------------------------

    def _follow(self, create: Any, handle: Any, *others: Any) -> Any:
        """A pointer made from a pointer is of the same tensor; `splat` has the pointer second."""
        made = create(handle, *others)
        source = handle if isinstance(handle, interpreter.TensorHandle) else others[0]
        if ORIGIN in source.attr:
            made.set_attr(ORIGIN, source.attr[ORIGIN])
        return made

    def create_select(self, create: Any, condition: Any, yes: Any, no: Any) -> Any:
        """One pointer of two is of the tensor of the one that is taken."""
        made, taken = create(condition, yes, no), yes if condition.data.all() else no
        if ORIGIN in taken.attr and condition.data.size == 1:
            made.set_attr(ORIGIN, taken.attr[ORIGIN])
        return made

    # ---- memory ---------------------------------------------------------------------------------------------

    def create_masked_load(self, load: Any, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        self._note("read", ptrs, mask)
        dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
        # On a GPU it may be anything. (The interpreter also says None of a single zero.)
        if other is None and ptrs.data.size > 1:
            rubbish = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max // 2
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, rubbish, dtype), ptrs.get_element_ty())
        return load(ptrs, mask, other, *options)

    def create_masked_store(self, store: Any, ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
        addresses = self._note("write", ptrs, mask)
        if len(np.unique(addresses)) < len(addresses):
            values = np.broadcast_to(value.data, ptrs.data.shape)[_mask_of(mask, ptrs)]
            own = np.ones(addresses.shape, bool)
            for tensor in self.sanitizer.common:
                own &= ~Region(tensor).holds(addresses)
            both = np.stack([addresses, values.astype(np.float64).view(np.uint64)], axis=1)[own]
            if len(np.unique(both, axis=0)) > len(np.unique(addresses[own])):
                self._fail(Raced(f"{self.kernel}: two lanes of one store write unlike values to one place"))
        return store(ptrs, value, mask, *options)

    def create_atomic_rmw(
        self, change: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        self._note("change", ptr, mask, sem)
        return change(op, ptr, val, mask, sem, scope)

    def create_atomic_cas(self, change: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        self._note("change", ptr, None, sem)
        return change(ptr, cmp, val, sem, scope)

    def create_barrier(self, barrier: Any) -> None:
        self.programs.barrier()
        barrier()

    def _note(self, kind: str, ptrs: Any, mask: Any, sem: Any = None) -> np.ndarray:
        """Whether all lanes may, and who they were.   -> (lanes that are not masked,) uint64"""
        addresses = ptrs.data[_mask_of(mask, ptrs)]
        own = ptrs.attr.get(ORIGIN)
        allowed = np.zeros(addresses.shape, bool) if own is None else self.regions[own].holds(addresses)
        for tensor in self.sanitizer.reach:
            if not allowed.all():
                allowed = allowed | Region(tensor).holds(addresses)
        if not allowed.all():
            where = self._where(addresses[~allowed][0], own)
            count = f"{(~allowed).sum()} of {ptrs.data.size} lanes"
            self._fail(
                Strayed(f"{self.kernel}, program {self.programs.now}: {count} {kind} outside: {where}")
            )
        if not self.waited and any(Region(tensor).holds(addresses).any() for tensor in self.sanitizer.late):
            where = self._where(addresses[0], own)
            self._fail(
                Raced(f"{self.kernel}, program {self.programs.now}: {kind}s {where} and has not waited")
            )
        if fault := self.programs.note(kind, addresses, None if sem is None else sem.name):
            self._fail(Raced(f"{self.kernel}, program {self.programs.now}: {fault}"))
        return addresses

    def _fail(self, fault: AssertionError) -> None:
        self.fault = fault
        raise fault

    def _where(self, address: Any, own: int | None = None) -> str:
        """The element of that argument, or of the nearest one that begins before."""
        before = [region for region in self.regions if region.start <= address] or self.regions
        region = max(before, key=lambda region: region.start) if own is None else self.regions[own]
        return f"element {(int(address) - region.start) // region.size} of {self._name(region)}"

    def _name(self, region: Region) -> str:
        for name, value in self.arguments.items():
            for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
                same = getattr(tensor, "data_ptr", int)() == region.start
                if same and tensor.shape == region.tensor.shape:
                    return f"{name}[{i}]" if isinstance(value, tuple) else name
        return "memory that no argument names"


def _mask_of(mask: Any, ptrs: Any) -> np.ndarray:
    """(lanes) bool; the interpreter's masks may be integers."""
    return np.broadcast_to(True if mask is None else mask.data.astype(bool), ptrs.data.shape)


def _around(original: Any, stand_in: Any) -> Any:
    return lambda *args, **kwargs: stand_in(original, *args, **kwargs)


def _around_method(original: Any, stand_in: Any) -> Any:
    return lambda self, *args, **kwargs: stand_in(self, original, *args, **kwargs)
