"""What every test relies on."""

import os

import torch

pytest_plugins = ["labs.kit.plugin"]

# Two cores: one thread a test leaves room for what else runs, and tiny models gain nothing from more.
torch.set_num_threads(1)

# Without a GPU the Triton kernels run through its interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
