"""Memory that all GPUs of one host read and write. Stands for `create_shared_buffer` of
vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

PyTorch's symmetric memory gives the same addresses, once a process: a second engine there waits for ever, since its
rendezvous counts those of the first one's group.
"""

import ctypes
from typing import Protocol

import torch

# cudaDevP2PAttrNativeAtomicSupported
NATIVE_ATOMICS = 3


class PeerMemory(Protocol):
    """What one process has, all zeros, and what others have. Its calls raise RuntimeError, naming what was refused."""

    def offer(self, nbytes: int) -> bytes:
        """Have so many bytes; what others need to open them."""

    def open(self, offers: list[bytes]) -> list[int]:
        """What all have offered, by rank -> where this process finds it."""

    def close(self) -> None:
        """Give back all of it."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class CudaIpc:
    """By the CUDA runtime's handles between processes, as vLLM has it: a handle is 64 bytes, on any pipe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._own: ctypes.c_void_p | None = None
        self._opened: list[ctypes.c_void_p] = []

    def offer(self, nbytes: int) -> bytes:
        self._cuda = cuda_runtime()
        own, handle = ctypes.c_void_p(), _Handle()
        self._call("cudaMalloc", ctypes.byref(own), ctypes.c_size_t(nbytes))
        self._own = own
        self._call("cudaMemset", own, 0, ctypes.c_size_t(nbytes))
        self._call("cudaDeviceSynchronize")
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), own)
        return bytes(handle)

    def open(self, offers: list[bytes]) -> list[int]:
        addresses = []
        for rank, offer in enumerate(offers):
            address = self._own
            if rank != self.rank:
                self._check_link(rank)
                address = ctypes.c_void_p()
                lazily = ctypes.c_uint(1)  # cudaIpcMemLazyEnablePeerAccess
                self._call(
                    "cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(offer), lazily
                )
                self._opened.append(address)
            addresses.append(address.value)
        return addresses

    def close(self) -> None:
        for address in self._opened:
            self._cuda.cudaIpcCloseMemHandle(address)
        if self._own is not None:
            self._cuda.cudaFree(self._own)
        self._opened, self._own = [], None

    def _check_link(self, rank: int) -> None:
        """Links with atomic operations are NVLink's: over others these sums were never measured beside NCCL's."""
        own, has_atomics = ctypes.c_int(), ctypes.c_int()
        self._call("cudaGetDevice", ctypes.byref(own))
        other = own.value - self.rank + rank  # ranks are on neighbours, see `device_of`
        self._call("cudaDeviceGetP2PAttribute", ctypes.byref(has_atomics), NATIVE_ATOMICS, own.value, other)
        if not has_atomics.value:
            raise RuntimeError(f"GPU {own.value} and GPU {other}: their link has no atomic operations")

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            self._cuda.cudaGetLastError()  # it is told here: PyTorch need not find it
            raise RuntimeError(f"{name}: {self._cuda.cudaGetErrorString(code).decode()} ({code})")


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that PyTorch has loaded."""
    if not torch.version.cuda:
        raise RuntimeError("libcudart: this PyTorch has none")
    cuda = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    return cuda
