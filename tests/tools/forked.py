"""A server of forks with torch in it: an import of torch is most of what a process of a test takes."""

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from unittest import mock

# Whether Triton interprets its kernels is chosen by then: tests/conftest.py has set it for this machine.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        # Of distributed tensors `assert_close` imports all there is.
        *("torch", "safetensors.torch", "torch.distributed.tensor", "typer.rich_utils", "pydantic"),
        *("triton", "tokenizers", "pytest", "hypothesis", "anyio.pytest_plugin", "anyio._backends._asyncio"),
        "xdist.plugin",
    ]
)


class Forked:
    """What `start_process` has of a process, a `subprocess.Popen`, as far as minivllm uses it."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid: int = process.pid
        self.returncode: int | None = None
        self._process, self._lock = process, threading.Lock()
        atexit.register(self.kill)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._process.exitcode is not None:
                self.returncode = self._process.exitcode
                self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            wait([self._process.sentinel], timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start_forked(module: str) -> tuple[Connection, Forked]:
    """As `minivllm.processes.start_process`, but for the fresh interpreter."""
    ours, theirs = SERVER.Pipe()
    with theirs:
        process = SERVER.Process(target=_run, args=(module, theirs, dict(os.environ)))
        process.start()
    return ours, Forked(process)


def _run(module: str, pipe: Connection, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    importlib.import_module(module).main(descriptor)


@contextmanager
def forked_processes() -> Iterator[None]:
    """Engines' processes and ranks that are started inside are forks. What the command starts are fresh ones."""
    with (
        mock.patch("minivllm.serving.engine_process.start_process", start_forked),
        mock.patch("minivllm.parallel.other_ranks.start_process", start_forked),
    ):
        yield
