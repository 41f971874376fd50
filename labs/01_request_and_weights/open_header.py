"""Open exercise, phase 01: what an adapter's file holds, with few of its bytes read. `lab open 1` judges it.

A server judges an adapter before it reads it: ranks and shapes are enough for that. A safetensors file starts with
8 bytes, the length of its header as a little-endian number. The header is JSON: the name of each tensor, its dtype,
shape and place. Beside them there may be `__metadata__`, which is no tensor. Data follows.

Budget: at most 1.1 times the bytes of the header and its length. A file that breaks off in its header, or says that
its header is longer than itself, brings a ValueError.
"""

import json
from collections.abc import Callable


def shapes(read: Callable[[int, int], bytes], size: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by its name, in the file's order.

    read(start, length)   bytes of the file from `start`; fewer where it ends     size   of the file, in bytes
    """
    content = read(0, size)
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > size - 8:
        raise ValueError(f"a file of {size} bytes has no header of {length}")
    header = json.loads(content[8 : 8 + length])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
