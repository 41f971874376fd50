"""What libraries say of themselves, kept from people's terminals. It imports nothing that takes time."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

# torchao, which transformers and PEFT import, tells of kernels for hardware that is not there, and PyTorch of torchao.
TALKATIVE = ("torchao", "torch.utils._pytree")


def quiet_libraries() -> None:
    """For commands, before anything is imported: no remarks on missing hardware, and no progress bars but our own."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def no_warnings_of_torchao() -> Iterator[None]:
    """For a program of other people's, whose logging is theirs: nobody warns inside."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
