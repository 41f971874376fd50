"""The process of a rank: `python -m minivllm.parallel.rank_process FD`, which `OtherRanks` starts.

Stands for `WorkerProc.worker_main` of vllm/v1/executor/multiproc_executor.py (v0.22.1).
"""

import os
import signal
import sys
from multiprocessing.connection import Connection

from minivllm.parallel.follower import follow
from minivllm.parallel.other_ranks import end_with_parent


def main(descriptor: int) -> None:
    """Follow rank 0 through a pipe. It has no signals of its own: when to end, rank 0 says."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    os.set_inheritable(descriptor, False)
    follow(Connection(descriptor))
    os._exit(0)  # without waiting for threads that read, or for collectives that others have left


if __name__ == "__main__":
    main(int(sys.argv[1]))
