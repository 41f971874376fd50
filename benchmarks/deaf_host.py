"""Stands in for an engine's process: it hears every order and does nothing. `python -m benchmarks.deaf_host FD`."""

import pickle
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
        while pickle.loads(pipe.recv_bytes())[-1] is not None:
            pass
