"""Ways to spoil an adapter, each with a random part: what a careless or a hostile uploader may leave in a folder."""

import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.worlds.adapter_folders import CONFIG, WEIGHTS, read_safetensors, set_size, write_safetensors
from tests.worlds.spoiled_adapters import PICKLE, edit_config

NEW, TOKENIZER = "new_embeddings.safetensors", "tokenizer_config.json"
HIDDEN, VOCABULARY = 48, 97

WAYS: dict[str, Callable[[random.Random, Path], None]] = {}

# What no field of a config and no part of a header expects.
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3.5, 1e308, -1e308, 2**31, 2**63, 10**400, float("nan"), float("inf")),
    *("", "x", "\0", "\x1b[2J", "\ud800", "a\nb", "é" * 500, "x" * 100_000, "gaussian", "LORA", "../.."),
    *([], {}, [[]], [None], [0], ["q_proj"], {"": 0}, {"q_proj": None}, [[[[[[[[]]]]]]]], list(range(5000))),
]
HUNGRY_PATTERNS = [
    *(
        "(.*)*x",
        r"(\w|\w\w|_|\.)+[!?]",
        "(a|a|.)*[!?]",
        r"(\w+\.?)+[!?]",
        "(.+)+!",
        "(a|a)*!",
        ".*" * 40 + "x",
    ),
    *("(.*.*.*)*y", "x*" * 128, "(" * 60 + "a" + ")+" * 60, ".{99999}" * 20, "(" * 5000, "(?R)", r"(\1)", ""),
    *("(?=.*" * 20 + "x" + ")" * 20, "{e<=9}q_proj{e<=9}", "(?i)q", "(?P<a>x)(?P=a)", "\\", "[", "q_proj)"),
    *(r"(?:.*,){20}x", "\0", "\ud800"),
]


def way(function: Callable[[random.Random, Path], None]) -> Callable[[random.Random, Path], None]:
    WAYS[function.__name__] = function
    return function


def flip(data: bytes, rng: random.Random, until: int | None = None) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(until or len(data))] = rng.randrange(256)
    return bytes(changed)


def change(folder: Path, name: str, function: Callable[[bytes], bytes]) -> None:
    (folder / name).write_bytes(function((folder / name).read_bytes()))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


# ---- the config -------------------------------------------------------------------------------------------------


@way
def config_bytes(rng: random.Random, folder: Path) -> None:
    change(folder, CONFIG, lambda data: flip(data, rng))


@way
def config_cut(rng: random.Random, folder: Path) -> None:
    change(folder, CONFIG, lambda data: data[: rng.randrange(len(data))])


@way
def config_field(rng: random.Random, folder: Path) -> None:
    names = [*json.loads((folder / CONFIG).read_text()), "context_length", "kasa_config", "monteclora_config"]
    edit_config(folder, **{rng.choice(names): rng.choice(ODD_VALUES) for _ in range(rng.randint(1, 3))})


@way
def config_pattern(rng: random.Random, folder: Path) -> None:
    keys = rng.choices(HUNGRY_PATTERNS, k=rng.choice([1, 1, 1, 3, 20]))
    pattern = {key + rng.choice(["", "", "x", "|y"]): rng.choice([3, 4, "4", None]) for key in keys}
    edit_config(folder, **{rng.choice(["rank_pattern", "alpha_pattern"]): pattern})


@way
def config_many_patterns(rng: random.Random, folder: Path) -> None:
    count = rng.choice([1000, 2000, 3000, 20_000])
    key = rng.choice(["layers.{}.q_proj", r"layers\.{}\.(q|k)_proj", "x{}" * 30])
    edit_config(folder, alpha_pattern={key.replace("{}", str(i)): 3 for i in range(count)})


@way
def other_files(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice([CONFIG, WEIGHTS])
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind < 5:
        path.symlink_to(["nowhere", path.name, "/dev/zero"][kind - 2])
    else:
        set_size(path, rng.choice([2**40, 2**33, 2**21]))


# ---- safetensors ------------------------------------------------------------------------------------------------


@way
def weights_bytes(rng: random.Random, folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(flip(data, rng, 8 + struct.unpack("<Q", data[:8])[0]))


@way
def weights_cut(rng: random.Random, folder: Path) -> None:
    change(
        folder,
        WEIGHTS,
        lambda data: data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + rng.randbytes(9),
    )


@way
def weights_entry(rng: random.Random, folder: Path) -> None:
    header, data = read_safetensors(folder / WEIGHTS)
    name = rng.choice([name for name in header if name != "__metadata__"])
    numbers = [0, 1, -1, 4, 48, 2**31, 2**62, 2**64, 10**400, 1.5, True, None, "4"]
    entry = header[name]
    part = rng.randrange(6)
    if part == 0:
        entry["dtype"] = rng.choice(["F64", "F16", "I8", "BOOL", "F8_E4M3", "F4", "C64", "", 5, None])
    elif part == 1:
        entry["shape"] = [rng.choice(numbers) for _ in range(rng.choice([0, 1, 2, 3, 9, 50_000]))]
    elif part == 2:
        entry["data_offsets"] = [rng.choice(numbers) for _ in range(rng.choice([0, 1, 2, 3]))]
    elif part == 3:
        header[name] = rng.choice(ODD_VALUES)
    elif part == 4:
        entry[rng.choice([*entry])] = rng.choice(ODD_VALUES)
    else:
        header = rng.choice(ODD_VALUES)
    write_safetensors(folder / WEIGHTS, header, data)


@way
def weights_names(rng: random.Random, folder: Path) -> None:
    tensors = tensors_of(folder)
    old = rng.choice([*tensors])
    new = rng.choice(
        [
            "",
            "x" * rng.choice([600, 100_000, 3_000_000]),
            old + "\x1b[31m\n",
            old.replace("q_proj", "q\u202eproj"),
            "." * 500,
            old.removeprefix("base_model.model."),
            old.replace("layers.0", "layers.9").replace("layers.1", "layers.9"),
            old.replace("lora_A", "lora_magnitude_vector"),
            "experts." * 60 + "experts.lora_A.weight",
            old.replace(".weight", ".bias"),
        ]
    )
    header, data = read_safetensors(folder / WEIGHTS)
    header[new] = header.pop(old)
    text = json.dumps(header)
    if rng.random() < 0.2:
        text = text.replace(json.dumps(new), '"\\ud800' + "x" * 9 + '"')
    write_safetensors(folder / WEIGHTS, text.encode(), data)


@way
def weights_tensor(rng: random.Random, folder: Path) -> None:
    tensors = tensors_of(folder)
    for name in rng.sample([*tensors], k=rng.randint(1, 2)):
        old = tensors[name]
        kind = rng.randrange(7)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[name] = old.t().contiguous()
        elif kind == 2:
            tensors[name] = torch.ones([rng.randrange(6) for _ in range(rng.randrange(4))])
        elif kind == 3:
            tensors[name] = old.to(rng.choice([torch.int8, torch.bool, torch.float8_e5m2, torch.complex64]))
        else:
            old = tensors[name] = old.double()
            old[rng.randrange(old.shape[0]), -1] = [float("nan"), float("inf"), 1e300][kind - 4]
    save_file(tensors, folder / WEIGHTS)


@way
def weights_many(rng: random.Random, folder: Path) -> None:
    """Tensors by the ten thousand, or one of a terabyte that nobody wrote."""
    if rng.random() < 0.5:
        entry = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
        count = rng.choice([3000, 30_000, 99_000, 400_000])
        names = [f"base_model.model.model.layers.{i}.q_proj.lora_A.weight" for i in range(count)]
        write_safetensors(folder / WEIGHTS, dict.fromkeys(names, entry))
        return
    name = rng.choice([*tensors_of(folder), "base_model.model.lm_head.base_layer.weight"])
    rows = 2 ** rng.choice([20, 28, 36])
    entry = {"dtype": "F32", "shape": [4, rows], "data_offsets": [0, 16 * rows]}
    write_safetensors(folder / WEIGHTS, {name: entry}, more=16 * rows)


# ---- pickles ----------------------------------------------------------------------------------------------------


def save_pickle(folder: Path, content: Any, **options: Any) -> None:
    (folder / WEIGHTS).unlink(missing_ok=True)
    torch.save(content, folder / PICKLE, **options)


def save_archive(folder: Path, data: bytes, storages: dict[str, bytes], compression: int = 0) -> None:
    (folder / WEIGHTS).unlink(missing_ok=True)
    with zipfile.ZipFile(folder / PICKLE, "w", compression) as archive:
        archive.writestr("a/data.pkl", data)
        for key, content in storages.items():
            archive.writestr(f"a/data/{key}", content)


class Call:
    """Unpickled, it calls something."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple:
        return self.call


@way
def pickle_bytes(rng: random.Random, folder: Path) -> None:
    save_pickle(folder, tensors_of(folder))
    data = (folder / PICKLE).read_bytes()
    (folder / PICKLE).write_bytes(flip(data, rng) if rng.random() < 0.8 else data[: rng.randrange(len(data))])


@way
def pickle_operations(rng: random.Random, folder: Path) -> None:
    """The pickle inside a whole archive changed, or made of nothing but operations."""
    save_pickle(folder, tensors_of(folder))
    with zipfile.ZipFile(folder / PICKLE) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    data = flip(found["data.pkl"], rng)
    if rng.random() < 0.5:
        operations = [
            getattr(pickle, name) for name in ("MARK", "EMPTY_DICT", "NONE", "DUP", "TUPLE2", "POP")
        ]
        data = b"\x80\x02" + b"".join(rng.choices(operations, k=rng.choice([10, 1000, 300_000]))) + b"."
    save_archive(
        folder, data, {name[5:]: content for name, content in found.items() if name.startswith("data/")}
    )


@way
def pickle_content(rng: random.Random, folder: Path) -> None:
    tensors = tensors_of(folder)
    name = rng.choice([*tensors])
    quantized = torch.quantize_per_tensor(torch.ones(4, 48), 0.1, 0, torch.qint8)
    nested: tuple = ()
    for _ in range(60):
        nested = (nested, nested)
    odd = [
        quantized,
        torch.eye(4).to_sparse(),
        torch.ones(4, 48, device="meta"),
        torch.ones(4, 48, dtype=torch.complex64),
        torch.ones(1).expand(2**20, 2**20),
        torch.ones(10_000)[::100],
        tensors[name].t(),
        {"inner": tensors[name]},
        [tensors[name]],
        nested,
        None,
        3.5,
        "x" * 100_000,
        Call(bytearray, 2**40),
        Call(bytearray, 3 * 2**28),
        Call(torch.Tensor, 2**18, 2**18),
        Call(os.mkdir, str(folder / "ran")),
        Call(set, [1]),
        torch.nn.Parameter(tensors[name]),
        torch.full((4, 48), float("nan")),
    ]
    value = rng.choice(odd)
    contents = [{**tensors, name: value}, value, [value], {**tensors, 5: tensors[name]}]
    save_pickle(folder, rng.choice([contents[0], *contents]))


@way
def pickle_bomb(rng: random.Random, folder: Path) -> None:
    kind = rng.randrange(3)
    if kind == 0:  # small to send, large to read
        save_pickle(folder, {"a": torch.zeros(4)})
        with zipfile.ZipFile(folder / PICKLE) as archive:
            data = archive.read("adapter_model/data.pkl")
        save_archive(folder, data, {"0": bytes(rng.choice([2**20, 2**26, 2**28]))}, zipfile.ZIP_DEFLATED)
    elif kind == 1:  # one storage in many tensors
        whole = torch.ones(2**16)
        save_pickle(folder, {f"{i}.lora_A.weight": whole for i in range(rng.choice([1000, 15_000, 40_000]))})
    else:
        save_pickle(folder, tensors_of(folder), _use_new_zipfile_serialization=False)


# ---- what an adapter may bring besides --------------------------------------------------------------------------


@way
def new_embeddings(rng: random.Random, folder: Path) -> None:
    names = rng.choice(
        [["input_embeddings"], ["output_embeddings"], ["input_embeddings", "output_embeddings"], ["x"]]
    )
    shapes = [(3, HIDDEN), (2, HIDDEN), (3, HIDDEN + 1), (9, HIDDEN), (0, HIDDEN), (3,)]
    values = [1.0, 1.0, float("nan"), float("inf"), 1e300]
    tensors = {
        name: torch.full(rng.choice(shapes), rng.choice(values), dtype=torch.float64) for name in names
    }
    save_file(tensors, folder / NEW)
    if rng.random() < 0.3:
        change(folder, NEW, lambda data: flip(data, rng, 60))


@way
def tokenizer(rng: random.Random, folder: Path) -> None:
    """An adapter that adds tokens, and whose own tokenizer is spoiled."""
    from tests.worlds.models import character_tokenizer

    save_file({"input_embeddings": torch.ones(3, HIDDEN)}, folder / NEW)
    character_tokenizer().save_pretrained(folder)
    kind = rng.randrange(5)
    if kind == 0:
        change(folder, "tokenizer.json", lambda data: flip(data, rng))
    elif kind == 1:
        config = json.loads((folder / TOKENIZER).read_text())
        name = rng.choice(
            [*config, "added_tokens_decoder", "extra_special_tokens", "padding_side", "auto_map"]
        )
        (folder / TOKENIZER).write_text(json.dumps({**config, name: rng.choice(ODD_VALUES)}))
    elif kind == 2:
        config = json.loads((folder / TOKENIZER).read_text())
        value = rng.choice(["12", [], {}, -1, float("nan"), True])
        (folder / TOKENIZER).write_text(json.dumps({**config, "model_max_length": value}))
    elif kind == 3:
        name = rng.choice(["tokenizer.json", TOKENIZER, "added_tokens.json"])
        set_size(folder / name, rng.choice([2**22 + 1, 2**27, 2**40]))
    else:
        content = json.loads((folder / "tokenizer.json").read_text())
        content[rng.choice([*content])] = rng.choice(ODD_VALUES)
        (folder / "tokenizer.json").write_text(json.dumps(content))
