"""An adapter is the same, and is refused by the same sentence, whether or not its file's layout is known."""

import json
import random
import shutil
import struct
import threading

import pytest
import torch
from malformed_adapters import CONFIG, WAYS, WEIGHTS, configure, tensors_of
from safetensors.torch import load_file, save_file
from tiny_engine import tiny_world
from tiny_set import AdapterSet

from minivllm import LoRARequest
from minivllm.gpu.page_locked import PageLockedMemory
from minivllm.gpu.slot_writer import SlotWriter, _pieces
from minivllm.lora import loading
from minivllm.lora.loading import AdapterSource
from minivllm.sources import known_layouts
from minivllm.sources.known_layouts import KnownLayouts

WORLD_OPTIONS = {"lora_extra_vocab_size": 4, "bias_enabled": True}
# Names of adapters of a tiny world whose files hold A's and B's of linears alone: all of them.
PLAIN = ["qv", "all", "mlp", "patterns"]
OTHERS = {
    "bias": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "o_proj"], "lora_bias": True},
    "embedding": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens"]},
    "regex": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "alpha_pattern": {"q_pro(j|k)": 3}},
}
FUSED = {"fused": {"r": 3, "lora_alpha": 7, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


class Loaders:
    """A model's plain source (`plain`), and one around it that knows layouts (`known`).

    left   paths that `known` has left to the other
    """

    def __init__(self, engine):
        self.manager = engine.adapters.manager
        self.plain = AdapterSource(self.manager)
        beneath = AdapterSource(self.manager)
        self.known = KnownLayouts(beneath)
        self.left = []
        read = beneath._read

        def note(lora_request, folder, shapes_only):
            self.left.append(lora_request.lora_path)
            return read(lora_request, folder, shapes_only)

        beneath._read = note

    def both(self, folder, shapes_only=False):
        """What each makes of a folder."""
        request = LoRARequest("somebody", 7, str(folder))
        return tuple(outcome(loader, request, shapes_only) for loader in (self.plain, self.known))


def outcome(loader, request, shapes_only=False):
    try:
        return loader.check(request) if shapes_only else loader.load(request)
    except (ValueError, FileNotFoundError) as error:
        return type(error), str(error)


@pytest.fixture
def loaders(world):
    return Loaders(world.engine(**WORLD_OPTIONS))


def contents(lora):
    """All that there is to see of an adapter."""
    modules = {
        name: (
            type(weights),
            weights.module_name,
            weights.rank,
            [
                part and (part.module_name, part.rank, part.lora_alpha, part.scaling, list(part.beside))
                for part in weights.parts
            ],
        )
        for name, weights in lora.loras.items()
    }
    return lora.id, lora.name, lora.rank, lora.is_accepted, sorted(lora.beside), modules


def assert_same(plain, known):
    if isinstance(plain, tuple) or isinstance(known, tuple):
        assert plain == known
        return
    assert contents(plain) == contents(known)
    for name, weights in plain.loras.items():
        for expected, tensor in zip(weights.tensors, known.loras[name].tensors, strict=True):
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert tensor.is_contiguous() and tensor.device == expected.device
            assert expected.is_meta or torch.equal(tensor, expected), name


def like(folder, source, seed, dtype=None):
    """An adapter with the layout of another one, and numbers of its own."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype or tensor.dtype)
        for name, tensor in tensors_of(source).items()
    }
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", ["float64", "float32", "bfloat16"])
def test_numbers_are_the_files_in_the_slots_dtype_and_b_is_scaled(world, slots, dtype, tmp_path):
    loaders = Loaders(world.engine(dtype=slots))
    for seed, name in enumerate(2 * PLAIN):
        folder = like(tmp_path / str(seed), world.path(name), seed, dtype)
        plain, known = loaders.both(folder)

        assert_same(plain, known)
        assert_same(*loaders.both(folder, shapes_only=True))
        tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
        a, b = (tensors[f"base_model.model.model.layers.0.{where(name)}.lora_{s}.weight"] for s in "AB")
        packed = known.loras[
            f"model.layers.0.{'mlp.gate_up_proj' if name == 'mlp' else 'self_attn.qkv_proj'}"
        ]
        part = packed.parts[0]
        alpha, rank = config["lora_alpha"], len(a)
        scaling = alpha / rank**0.5 if config["use_rslora"] else alpha / rank
        assert torch.equal(part.lora_a, a.to(part.lora_a.dtype))
        assert torch.equal(part.lora_b, b.to(part.lora_b.dtype) * scaling)
    assert not loaders.left


def where(name):
    return "mlp.gate_proj" if name == "mlp" else "self_attn.q_proj"


def test_a_layout_is_worked_out_once(loaders, world, tmp_path, monkeypatch):
    worked_out = []
    monkeypatch.setattr(
        loaders.known,
        "_work_out",
        lambda *args, f=loaders.known._work_out: worked_out.append(1) or f(*args),
    )
    for seed in range(3):
        loaders.both(like(tmp_path / str(seed), world.path("all"), seed))
    assert len(worked_out) == 1

    configure(tmp_path / "0", lora_alpha=2)  # the same file with another scaling
    assert_same(*loaders.both(tmp_path / "0"))
    configure(
        tmp_path / "0", target_modules=["v_proj", "q_proj"], inference_mode=True
    )  # which decide nothing
    assert_same(*loaders.both(tmp_path / "0"))
    assert len(worked_out) == 2


def test_adapters_of_a_layout_share_no_memory_and_leave_nothing_behind(loaders, world, tmp_path):
    first, second = (like(tmp_path / str(seed), world.path("qv"), seed) for seed in range(2))
    request = LoRARequest("first", 1, str(first))
    lora = loaders.known.load(request)
    kept = {name: [t.clone() for t in weights.tensors] for name, weights in lora.loras.items()}

    for weights in loaders.known.load(LoRARequest("second", 2, str(second))).loras.values():
        for tensor in weights.tensors:
            tensor.fill_(float("nan"))

    for name, weights in lora.loras.items():
        assert all(map(torch.equal, weights.tensors, kept[name]))
    assert lora.nbytes == sum(t.nbytes for weights in lora.loras.values() for t in weights.tensors)
    assert_same(loaders.plain.load(request), loaders.known.load(request))


@pytest.mark.parametrize("variant, adapters", [("llama-llama3-rope", OTHERS), ("phi3-fused", FUSED)])
def test_what_is_not_plain_is_left_to_the_loader(variant, adapters, tmp_path):
    others = AdapterSet(tmp_path, variant, adapters)
    loaders = Loaders(others.engine(**WORLD_OPTIONS))
    for name in adapters:
        for _ in range(2):
            loaders.left.clear()
            plain, known = loaders.both(others.path(name))

            assert not isinstance(plain, tuple), plain
            assert_same(plain, known)
            assert_same(*loaders.both(others.path(name), shapes_only=True))
            assert name == "embedding" or loaders.left


@pytest.mark.parametrize("at_once", [0, 2**30], ids=["shapes first", "at once"])
def test_spoiled_adapters_get_the_same_sentences(loaders, world, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(loading, "READ_AT_ONCE", at_once)
    refused = 0
    for number in range(250):
        rng = random.Random(f"{at_once}/{number}")
        source, way = world.path(rng.choice(["qv", "all", "patterns"])), rng.choice([*WAYS])
        if "pattern" in way or "bomb" in way:  # takes long, or a timed match ends now here, now there
            continue
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        loaders.known.load(LoRARequest("good", 1, str(source)))
        WAYS[way](rng, folder)

        shapes_only = rng.random() < 0.3
        plain, known = loaders.both(folder, shapes_only)
        assert_same(plain, known)
        refused += isinstance(known, tuple)
        shutil.rmtree(folder)
    assert refused > 80


NUMBERS = {
    "NaN in A": ("lora_A", float("nan"), 8),
    "NaN in B": ("lora_B", float("nan"), 8),
    "Inf": ("lora_B", float("inf"), 8),
    "-Inf": ("lora_A", float("-inf"), 8),
    "Inf once scaled": ("lora_B", 1e38, 80),
    "Inf with that scaling": ("lora_B", -1e38, -80),
    "Inf in the slots' dtype": ("lora_A", 1e39, 8),
    "large, and not scaled": ("lora_A", 1e38, 80),
    "large, and scaled down": ("lora_B", 1e38, 1),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_are_judged_as_the_loader_does(world, case, tmp_path):
    (side, value, alpha), is_refused = NUMBERS[case], not case.startswith("large")
    loaders = Loaders(world.engine(dtype="float32"))
    loaders.known.load(LoRARequest("good", 1, str(world.path("qv"))))
    folder = like(tmp_path / "adapter", world.path("qv"), 3)
    configure(folder, lora_alpha=alpha)
    tensors = tensors_of(folder)
    names = [name for name in tensors if side in name]
    for name in (names[1], names[2]):  # the first by name is named
        tensors[name].view(-1)[5] = value
    save_file(tensors, folder / WEIGHTS)

    plain, known = loaders.both(folder)

    assert_same(plain, known)
    assert isinstance(known, tuple) == is_refused


def test_a_file_that_is_cut_or_grows_is_refused_though_its_header_is_known(loaders, world, tmp_path):
    for seed, spoil in enumerate([lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:9]]):
        folder = like(tmp_path / str(seed), world.path("qv"), seed)
        assert_same(*loaders.both(folder))
        (folder / WEIGHTS).write_bytes(spoil((folder / WEIGHTS).read_bytes()))

        plain, known = loaders.both(folder)

        assert plain == known and plain[0] is ValueError


def test_a_file_that_is_cut_while_it_is_read_is_refused(loaders, world, tmp_path, monkeypatch):
    folder = like(tmp_path / "adapter", world.path("qv"), 1)
    loaders.both(folder)
    read_into = known_layouts.read_into

    def cut(file, start, place):
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])
        read_into(file, start, place)

    monkeypatch.setattr(known_layouts, "read_into", cut)
    error, sentence = outcome(loaders.known, LoRARequest("somebody", 7, str(folder)))

    assert error is ValueError and "is not a readable safetensors file" in sentence


def test_a_header_of_another_order_is_another_layout(loaders, world, tmp_path):
    """Tensors of the same names and shapes, that lie elsewhere in the file."""
    folder = like(tmp_path / "adapter", world.path("all"), 1)
    assert_same(*loaders.both(folder))
    tensors = tensors_of(folder)
    names = random.Random(5).sample([*tensors], len(tensors))
    header, data = {}, b""
    for name in names:
        numbers = tensors[name].numpy().tobytes()
        header[name] = {
            "dtype": "F64",
            "shape": [*tensors[name].shape],
            "data_offsets": [len(data), len(data) + len(numbers)],
        }
        data += numbers
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)

    assert_same(*loaders.both(folder))
    assert not loaders.left


def test_no_more_than_so_many_layouts_are_kept_those_used_last(loaders, world, tmp_path, monkeypatch):
    monkeypatch.setattr(known_layouts, "MOST_LAYOUTS", 3)
    for name in ["qv", "all", "mlp", "qv", "patterns"]:
        assert_same(*loaders.both(world.path(name)))

    kept = list(loaders.known._layouts.values())
    assert [len(layout.judged.loras) for layout in kept] == [
        len(loaders.plain.check(LoRARequest("x", 1, str(world.path(n)))).loras)
        for n in ("mlp", "qv", "patterns")
    ]
    assert all(t.is_meta for layout in kept for t in layout.shapes)


def test_many_threads_read_what_one_reads(loaders, world, tmp_path, monkeypatch):
    monkeypatch.setattr(known_layouts, "MOST_LAYOUTS", 2)
    folders = [like(tmp_path / str(seed), world.path(PLAIN[seed % 4]), seed) for seed in range(8)]
    requests = [LoRARequest(f"adapter {n}", n + 1, str(folder)) for n, folder in enumerate(folders)]
    expected, faults = [loaders.plain.load(request) for request in requests], []

    def read(seed):
        rng = random.Random(seed)
        for _ in range(40):
            number = rng.randrange(len(requests))
            try:
                assert_same(expected[number], loaders.known.load(requests[number]))
            except BaseException as error:
                faults.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not faults


class Writer(SlotWriter):
    """Stages as on a GPU, in pieces that nobody locks."""

    def __init__(self, wrapped):
        super().__init__(wrapped, "cpu")
        self.on_gpu, self.memory = True, PageLockedMemory(lambda piece: lambda: None, lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_for_a_gpu_it_is_read_into_memory_to_copy_from_where_the_table_says(world, dtype, tmp_path):
    loaders = Loaders(world.engine(dtype="float32"))
    writer = loaders.manager.slot_writer = Writer(loaders.manager.wrapped)
    for seed, name in enumerate(2 * PLAIN):
        folder = like(tmp_path / str(seed), world.path(name), seed, dtype)
        plain, known = loaders.both(folder)
        staged = writer.pools[known]
        loaders.manager.stage(known)  # it is there already

        assert_same(plain, known)
        assert writer.pools[known] is staged
        inside = range(staged.data_ptr(), staged.data_ptr() + staged.nbytes)
        table, room = writer._split(staged)
        expected = [
            piece
            for module, layer in writer.modules.items()
            for piece in _pieces(layer, plain.get_lora(module))
        ]
        assert len(table) == len(expected)
        for (start, rows, columns), piece in zip(table.tolist(), expected):
            if piece is None:
                assert (rows, columns) == (0, 0)
            else:
                assert start * room.itemsize % 16 == 0
                assert torch.equal(room[start : start + rows * columns].view(rows, columns), piece)
        for weights in known.loras.values():
            assert all(tensor.data_ptr() in inside for tensor in weights.tensors)
    assert not loaders.left


def test_memory_of_an_adapter_that_is_refused_is_free_again(world, tmp_path):
    loaders = Loaders(world.engine(dtype="float32"))
    writer = loaders.manager.slot_writer = Writer(loaders.manager.wrapped)
    folder = like(tmp_path / "adapter", world.path("all"), 1)
    loaders.both(folder)
    tensors = tensors_of(folder)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, folder / WEIGHTS)
    before = writer.memory.nbytes

    for _ in range(40):
        assert isinstance(loaders.both(folder)[1], tuple)

    assert writer.memory.nbytes == before
