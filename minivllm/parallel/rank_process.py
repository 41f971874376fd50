"""The process of a rank: `python -m minivllm.parallel.rank_process FD`, which `OtherRanks` starts.

Stands for `WorkerProc.worker_main` of vllm/v1/executor/multiproc_executor.py (v0.22.1).
"""

import os
import sys

from minivllm.parallel.follower import follow
from minivllm.processes import pipe_to_parent


def main(descriptor: int) -> None:
    """Follow rank 0 through a pipe."""
    follow(pipe_to_parent(descriptor))
    os._exit(0)  # without waiting for threads that read, or for collectives that others have left


if __name__ == "__main__":
    main(int(sys.argv[1]))
