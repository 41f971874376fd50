"""What every test relies on."""

import logging
import os

import torch

pytest_plugins = ["labs.kit.plugin"]

# PEFT imports torchao, which warns of kernels for hardware that is not there and that no test calls.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

# Two cores: one thread a test leaves room for what else runs, and tiny models gain nothing from more.
torch.set_num_threads(1)

# Without a GPU the Triton kernels run through its interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that take longest, so that they do not come last, when the other processes have nothing left to do.
LONGEST = ("test_notebooks.py", "test_course.py", "test_texts_and_mutants.py", "test_engine_soak.py")


def pytest_collection_modifyitems(items):
    """Whole files change places; what is in them keeps its order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
