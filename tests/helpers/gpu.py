"""Where kernels run in this test run: on the GPU if there is one, else through Triton's interpreter."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="not verified here: needs CUDA")
