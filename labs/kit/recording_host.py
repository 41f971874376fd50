"""`minivllm.serving.engine_host`, which writes down what its engine does: for a program under `labs.kit.recording`."""

import os
import sys

from labs.kit.recording import FILE_VARIABLE, Recording
from minivllm.serving import engine_host

if __name__ == "__main__":
    with open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:
        Recording(file).install()
        engine_host.main(int(sys.argv[1]))
