"""How much of an adapter is read at all. vLLM has no such limits: vllm/lora/peft_helper.py reads what is there.

An adapter comes from anybody. Each limit is far above what trainers write and far below what hurts: a refusal takes
less than a second and less than 256 MB.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from minivllm.lora.checks import check_depth, without_duplicates

# PEFT writes 1 KB, and 100 bytes for each entry of a list of targets or of a pattern.
CONFIG_BYTES = 2**20

# An adapter of each expert of Qwen3-235B-A22B has 72,192 tensors: 94 layers, 128 experts, 3 linears, A and B.
MOST_TENSORS = 100_000
# 150 bytes a tensor and room for more; the library `safetensors` stops at 100 MB.
HEADER_BYTES = 16 * 2**20
# 70 characters are usual. Checks of names, above all by regular expressions, take time for each character.
LONGEST_TENSOR_NAME = 512
MOST_DIMENSIONS = 8

# Weights of at most so many bytes are read at once. Of larger files the shapes are first compared with the model's.
READ_AT_ONCE = 32 * 2**20


def open_file(path: str | Path) -> BinaryIO:
    """A file to read bytes from. OSError for anything else of that name: opening a pipe would wait for its writer."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"'{path}' is no plain file")
    return file


def file_size(file: BinaryIO) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read_config(path: str | Path) -> Any:
    """What a small JSON file holds. ValueError names a file that cannot be parsed; OSError passes through."""
    with open_file(path) as file:
        data = file.read(CONFIG_BYTES + 1)
        if len(data) > CONFIG_BYTES:
            raise ValueError(
                f"'{path}' has {file_size(file)} bytes, more than the {CONFIG_BYTES} that a config may have"
            )
    try:
        value = json.loads(data.decode(), object_pairs_hook=without_duplicates)
        check_depth(value)
    # ValueError: not JSON, not UTF-8, an int of 5,000 digits. RecursionError: brackets in brackets in brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}") from error
    return value
