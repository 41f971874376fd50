"""Processes of this package's own. Stands for a part of vllm/v1/engine/utils.py (v0.22.1), which forks or spawns.

Theirs run the caller's main module again. Here each runs one of ours, so that no script needs a guard.
"""

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection


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
