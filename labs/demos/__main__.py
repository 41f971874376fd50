"""Print an exercise's demo, on the code that this process runs on: `python -m labs.demos 2.2`."""

import os
import sys

from minivllm.commands.quiet import quiet_libraries

quiet_libraries()

import torch  # noqa: E402  whether there is a GPU is asked before Triton is imported

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from labs.demos import demo_of  # noqa: E402

for line in demo_of(sys.argv[1])():
    print(line, flush=True)
