"""What libraries say of themselves, kept from people's terminals. It imports nothing that takes time."""

import logging
import os
import signal
import sys
from types import FrameType

# torchao, which transformers and PEFT import, tells of kernels for hardware that is not there, and PyTorch of torchao.
TALKATIVE = ("torchao", "torch.utils._pytree")


def quiet_libraries() -> None:
    """For commands, before anything is imported: no remarks on missing hardware, and no progress bars but our own."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def end_at_ctrl_c() -> None:
    """For commands: Ctrl-C ends one that is still importing at once, and raises KeyboardInterrupt in any other.

    Importing runs libraries' code, some of which takes the KeyboardInterrupt for a module that cannot be imported.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                if sys.stdout.isatty():
                    os.write(1, b"\x1b[?25h\n")  # a spinner may have hidden the cursor
                os._exit(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
