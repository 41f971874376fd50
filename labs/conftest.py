"""For tests of hunts that are run by hand, as `lab hunt N` shows it; `lab hunt N --check` does the same by itself."""

import os

import pytest
import torch

import labs.kit.startup  # noqa: F401 -- before minivllm

# A test may import from it before pytest has read that it is a plugin of the file's.
pytest.register_assert_rewrite("tests.worlds.hunts")

# Triton's interpreter stands for a GPU that is not there. It is chosen before a test's file imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
