"""Starts and ends child processes and sends messages to them: an engine's (`serving`) and a model's ranks (`parallel`).

Stands for a part of vllm/v1/engine/utils.py (v0.22.1), which forks or spawns: its processes run the caller's main
module again. Here each runs a module of this package, so that no script needs a guard. Both ends of a pipe are ours and
no other process has it, so messages are pickled. docs/architecture.md has the price of msgpack and ZeroMQ.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

# So many seconds a thread may keep the others from running; Python's own 0.005 are half a step of a GPU.
SWITCH_SECONDS = 0.0003
# So many containers are allocated, and not freed, before the garbage collector runs. With Python's own number, 700, it
# runs several times in a step of 128 requests.
NEW_OBJECTS = 50_000


def start_process(module: str) -> tuple[Connection, subprocess.Popen]:
    """Run `python -m module FD` in a fresh interpreter with our paths; also the pipe to its file descriptor FD.

    It has a group of its own: Ctrl-C is ours alone.
    """
    ours, theirs = Pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    return ours, process


def pipe_to_parent(descriptor: int) -> Connection:
    """In the process that was started. It has no signals of its own, since the other one says when to end, and it ends
    with that one, whatever it waits for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="minivllm-parent", daemon=True).start()
    return Connection(descriptor)


def packed(message: Any) -> bytes:
    """A message that several processes are sent, or that is read later."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send(pipe: Connection, message: Any) -> None:
    """OSError when nobody is at the other end."""
    pipe.send_bytes(packed(message))


def receive(pipe: Connection) -> Any:
    """EOFError or OSError when nobody is at the other end."""
    return pickle.loads(pipe.recv_bytes())


def how_it_ended(process: subprocess.Popen, seconds: float) -> str:
    """Of a process whose pipe is closed.   seconds: for its end"""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "it does not answer"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def end_process(process: subprocess.Popen, seconds: float) -> None:
    """Wait so long for a process that was told to stop, and then kill it."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def avoid_pauses() -> None:
    """Tune a process that only serves, once all is loaded. vLLM: `freeze_gc_heap` of vllm/utils/gc_utils.py.

    The garbage collector skips the objects that exist now, because to look at them takes a tenth of a second. It looks
    at new ones seldom: a step makes thousands of objects, and nearly all of them are freed with the next.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
