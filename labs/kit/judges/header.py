"""Open exercise of phase 01: what an adapter's file holds, with few of its bytes read."""

import json
from collections.abc import Callable
from random import Random
from types import ModuleType

from labs.kit.judges import Refused

TITLE = "what an adapter's file holds, with few of its bytes read"
UNIT = "bytes read, by those of the header and its length"
BUDGET = 1.1


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """The worst of three sound files; Refused for a wrong answer, and where a broken file brings no ValueError."""
    answer = load()
    worst = 0.0
    for _ in range(3):
        content, shapes = _file(rng)
        found, count = _asked(answer, content, len(content))
        if found != shapes:
            wrong = sorted(set(shapes.items()) ^ set(_as_tuples(found).items()))[0][0]
            raise Refused(
                f"shapes() is wrong: {len(shapes)} tensors are there, and {wrong} is missing or differs"
            )
        worst = max(worst, count / (8 + int.from_bytes(content[:8], "little")))
    content, _ = _file(rng)
    longer = (len(content) + rng.randint(1, 1 << 40)).to_bytes(8, "little")
    for what, broken in (
        ("whose header is said to be longer than the file", longer + content[8:]),
        ("of five bytes", content[:5]),
    ):
        try:
            _asked(answer, broken, len(broken))
        except ValueError:
            continue
        raise Refused(f"shapes() takes a file {what}; it raises ValueError")
    return worst


def _asked(answer: ModuleType, content: bytes, size: int) -> tuple[dict, int]:
    """What the answer gives, and how many bytes it has read."""
    lengths: list[int] = []

    def read(start: int, length: int) -> bytes:
        part = content[max(start, 0) :][: max(length, 0)]
        lengths.append(len(part))
        return part

    return answer.shapes(read, size), sum(lengths)


def _as_tuples(found: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(found, dict):
        raise Refused(f"shapes() gave a {type(found).__name__}, not a dict of name -> shape")
    return {str(name): tuple(shape) for name, shape in found.items()}


def _file(rng: Random) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """A safetensors file as trainers write it, and its shapes. Its data is random."""
    rank, width, layers = rng.choice([8, 16]), rng.choice([256, 512]), rng.randint(4, 30)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for part in rng.sample(["q_proj", "k_proj", "v_proj", "o_proj"], 2):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}.lora_"
            shapes |= {f"{name}A.weight": (rank, width), f"{name}B.weight": (width, rank)}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    end = 0
    for name, (rows, columns) in shapes.items():
        header[name] = {
            "dtype": "F32",
            "shape": [rows, columns],
            "data_offsets": [end, end + 4 * rows * columns],
        }
        end += 4 * rows * columns
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rng.randbytes(end), shapes
