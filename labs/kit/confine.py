"""Confines this process for good, before it runs code that nobody trusts. Linux alone.

Landlock lets it write in one folder and nowhere else, and keeps its signals and debuggers from other processes.
A seccomp filter refuses what Landlock does not know of: other processes, networks, modes and owners of files.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path

from labs.kit.regions import LabError

# linux/landlock.h; all that writes is handled, so it is refused but where a rule allows it. Reading is free.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITES = sum(1 << bit for bit in (1, *range(4, 15)))  # write, remove, make, refer, truncate
_ON_FILES = 1 << 1 | 1 << 14  # of these what is asked of a file that is no folder: write and truncate
_SCOPES = 0b11  # abstract sockets and signals
_PATH_BENEATH = 1
LEAST_ABI = 3  # since then it knows of truncation

# prctl and seccomp
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CLONE_THREAD = 0x10000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}  # of this process alone, which is number 0
# fork, vfork; execve, execveat; socket, connect; ptrace, process_vm_writev; chmod, chown, xattr, utime; mount, unshare
_REFUSED = {
    "x86_64": (
        57,
        58,
        59,
        322,
        41,
        42,
        101,
        311,
        90,
        91,
        268,
        92,
        93,
        94,
        260,
        188,
        189,
        190,
        132,
        235,
        261,
        280,
        272,
    ),
    "aarch64": (221, 281, 198, 203, 117, 271, 52, 53, 54, 55, 5, 6, 7, 88, 40, 97, 268),
}


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def landlock_abi() -> int:
    """0 where there is none."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, 1)) if os.uname().sysname == "Linux" else 0


def require_confinement() -> None:
    """LabError where this machine cannot confine a process."""
    if landlock_abi() < LEAST_ABI or platform.machine() not in _AUDIT:
        raise LabError("submissions are run in Landlock, which this machine lacks: take Linux 6.2 or later")


def confine(folder: Path, memory: int) -> None:
    """From now on this process, and its threads, write in `folder` alone, and start no process.

    memory   bytes that it may allocate

    OSError where the kernel refuses. What is open stays open.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    _check(_libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _only_write_in(folder)
    _refuse_calls(platform.machine())


def _only_write_in(folder: Path) -> None:
    abi, libc = landlock_abi(), _libc()
    # Before ABI 6 there are no scopes, before ABI 4 no networks: the kernel wants the size that it knows.
    rules = _Ruleset(_WRITES, 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    for path, allowed in ((folder, _WRITES), (Path(os.devnull), _ON_FILES)):
        at = os.open(path, os.O_PATH)
        beneath = _Beneath(allowed, at)
        _check(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0))
        os.close(at)
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _refuse_calls(machine: str) -> None:
    """A filter that knows calls by their numbers: a thread may begin, no process may."""
    denied, unknown = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    refused = _REFUSED[machine]
    code = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, denied),
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, 0x40000000),  # x86's other numbers for the same calls
        (_RETURN, 0, 0, denied),
        (
            _IF_EQUAL,
            0,
            1,
            _CLONE3,
        ),  # its flags lie in memory, which a filter cannot read; libc then takes clone
        (_RETURN, 0, 0, unknown),
        *(step for number in refused for step in ((_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied))),
        (_IF_EQUAL, 0, 4, _PRLIMIT[machine]),
        (_LOAD, 0, 0, 16),
        (_IF_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, denied),
        (_RETURN, 0, 0, _ALLOW),
        (_IF_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),
        (_IF_SET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, denied),
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *step) for step in code)
    program = _Program(len(code), packed)
    _check(_libc().prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
