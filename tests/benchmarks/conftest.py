"""What every test of a benchmark relies on."""

import gc

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def what_was_here_before_stays_frozen():
    """A benchmark unfreezes all to free an engine, and then each look for garbage takes half a second.

    The engines of these tests are tiny; on a GPU their memory is wanted back all the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(gc, "unfreeze", lambda: None)
        yield
