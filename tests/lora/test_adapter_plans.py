"""An adapter that is read by a plan is what it is tensor by tensor, and is refused as well."""

import json
import random
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LoRARequest
from minivllm.gpu.page_locked import PageLockedMemory
from minivllm.gpu.slot_writer import SlotWriter, _pieces
from minivllm.lora import loading, plans
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from tests.worlds.adapter_folders import CONFIG, WEIGHTS, write_safetensors
from tests.worlds.engines import TinyWorld
from tests.worlds.malformed_adapters import tensors_of
from tests.worlds.spoiled_adapters import edit_config

WORLD_OPTIONS = {"lora_extra_vocab_size": 4, "bias_enabled": True}
# Names of adapters of a tiny world whose files hold A's and B's of linears alone: all of them.
PLAIN = ["qv", "all", "mlp", "patterns"]
OTHERS = {
    "bias": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "o_proj"], "lora_bias": True},
    "embedding": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens"]},
    "regex": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "alpha_pattern": {"q_pro(j|k)": 3}},
}
FUSED = {"fused": {"r": 3, "lora_alpha": 7, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}}


class Loaders:
    """Adapters of one model, read tensor by tensor (`plain`), and by a plan (`planned`)."""

    def __init__(self, engine):
        self.manager = engine.adapters.manager
        self.source = AdapterSource(self.manager)

    def plain(self, folder):
        helper = PEFTHelper.from_local_dir(str(folder), extensions=self.manager.extensions)
        lora = LoRAModel.from_local_checkpoint(
            str(folder), None, helper, lora_model_id=7, **self.source.reading
        )
        self.manager.wrapped.accept(lora)
        lora.name = "somebody"
        return lora

    def planned(self, folder, shapes_only=False):
        request = LoRARequest("somebody", 7, str(folder))
        return self.source.check(request) if shapes_only else self.source.load(request)

    @property
    def plans(self):
        return list(self.source._plans.values())


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


@pytest.mark.parametrize(
    ("slots", "dtype"),
    [
        *(("float64", torch.float64), ("float64", torch.float16), ("float32", torch.float64)),
        *(("float32", torch.bfloat16), ("bfloat16", torch.float32), ("bfloat16", torch.bfloat16)),
    ],
    ids=str,
)
def test_numbers_are_the_files_in_the_slots_dtype_and_b_is_scaled(world, slots, dtype, tmp_path):
    loaders = Loaders(world.engine(dtype=slots))
    for seed, name in enumerate(2 * PLAIN):
        folder = like(tmp_path / str(seed), world.path(name), seed, dtype)
        known = loaders.planned(folder)

        assert_same(loaders.plain(folder), known)
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
    assert all(plan.packed for plan in loaders.plans)


def where(name):
    return "mlp.gate_proj" if name == "mlp" else "self_attn.q_proj"


def test_one_plan_is_made_for_adapters_that_differ_in_their_numbers_alone(loaders, world, tmp_path):
    for seed in range(3):
        loaders.planned(like(tmp_path / str(seed), world.path("all"), seed))
    assert len(loaders.plans) == 1

    edit_config(tmp_path / "0", lora_alpha=2)  # the same file with another scaling
    assert_same(loaders.plain(tmp_path / "0"), loaders.planned(tmp_path / "0"))
    edit_config(
        tmp_path / "0", target_modules=["v_proj", "q_proj"], inference_mode=True
    )  # which decide nothing
    assert_same(loaders.plain(tmp_path / "0"), loaders.planned(tmp_path / "0"))
    assert len(loaders.plans) == 2


def test_adapters_of_a_layout_share_no_memory_and_leave_nothing_behind(loaders, world, tmp_path):
    first, second = (like(tmp_path / str(seed), world.path("qv"), seed) for seed in range(2))
    lora = loaders.planned(first)
    kept = {name: [t.clone() for t in weights.tensors] for name, weights in lora.loras.items()}

    for weights in loaders.planned(second).loras.values():
        for tensor in weights.tensors:
            tensor.fill_(float("nan"))

    for name, weights in lora.loras.items():
        assert all(map(torch.equal, weights.tensors, kept[name]))
    assert lora.nbytes == sum(t.nbytes for weights in lora.loras.values() for t in weights.tensors)
    assert_same(loaders.plain(first), loaders.planned(first))


@pytest.mark.parametrize("variant, adapters", [("llama-llama3-rope", OTHERS), ("phi3-fused", FUSED)])
def test_what_is_not_plain_is_the_same_each_time(variant, adapters, tmp_path):
    others = TinyWorld(tmp_path, variant, adapters)
    loaders = Loaders(others.engine(**WORLD_OPTIONS))
    for name in adapters:
        for _ in range(2):
            assert_same(loaders.plain(others.path(name)), loaders.planned(others.path(name)))
            shapes = loaders.planned(others.path(name), shapes_only=True)
            assert all(tensor.is_meta for tensor in shapes.tensors)


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
def test_numbers_are_judged_tensor_by_tensor_where_one_is_large(world, case, tmp_path):
    (side, value, alpha), is_refused = NUMBERS[case], not case.startswith("large")
    loaders = Loaders(world.engine(dtype="float32"))
    loaders.planned(world.path("qv"))
    folder = like(tmp_path / "adapter", world.path("qv"), 3)
    edit_config(folder, lora_alpha=alpha)
    tensors = tensors_of(folder)
    names = [name for name in tensors if side in name]
    for name in (names[1], names[2]):  # the first by name is named
        tensors[name].view(-1)[5] = value
    save_file(tensors, folder / WEIGHTS)

    if is_refused:
        module = names[1].removeprefix("base_model.model.").removesuffix(".weight")
        with pytest.raises(ValueError, match=rf"{module} holds NaN or Inf as torch.float32"):
            loaders.planned(folder)
    else:
        assert_same(loaders.plain(folder), loaders.planned(folder))


def test_a_file_that_is_cut_or_grows_is_refused_though_its_plan_is_kept(loaders, world, tmp_path):
    for seed, spoil in enumerate([lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:9]]):
        folder = like(tmp_path / str(seed), world.path("qv"), seed)
        loaders.planned(folder)
        (folder / WEIGHTS).write_bytes(spoil((folder / WEIGHTS).read_bytes()))

        with pytest.raises(ValueError, match="is not a readable safetensors file"):
            loaders.planned(folder)


def test_a_file_that_is_cut_while_it_is_read_is_refused(loaders, world, tmp_path, monkeypatch):
    folder = like(tmp_path / "adapter", world.path("qv"), 1)
    loaders.planned(folder)
    read_into = plans.read_into

    def cut(file, start, place):
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])
        read_into(file, start, place)

    monkeypatch.setattr(plans, "read_into", cut)

    with pytest.raises(ValueError, match="was cut short while it was read"):
        loaders.planned(folder)


def test_a_header_of_another_order_is_another_layout(loaders, world, tmp_path):
    """Tensors of the same names and shapes, that lie elsewhere in the file."""
    folder = like(tmp_path / "adapter", world.path("all"), 1)
    loaders.planned(folder)
    tensors = tensors_of(folder)
    names = random.Random(5).sample([*tensors], len(tensors))
    header, data = {}, b""
    for name in names:
        numbers = tensors[name].numpy().tobytes()
        place = [len(data), len(data) + len(numbers)]
        header[name] = {"dtype": "F64", "shape": [*tensors[name].shape], "data_offsets": place}
        data += numbers
    write_safetensors(folder / WEIGHTS, header, data)

    assert_same(loaders.plain(folder), loaders.planned(folder))
    assert len(loaders.plans) == 2


def test_plans_are_kept_for_so_many_tensors_those_used_last(loaders, world, monkeypatch):
    count = {name: len(tensors_of(world.path(name))) for name in PLAIN}
    monkeypatch.setattr(loading, "MOST_KEPT", count["mlp"] + count["qv"] + count["patterns"])
    for name in ["qv", "mlp", "qv", "patterns"]:
        loaders.planned(world.path(name))

    assert [len(plan.in_order) for plan in loaders.plans] == [count["mlp"], count["qv"], count["patterns"]]

    loaders.planned(world.path("all"))

    assert sum(len(plan.in_order) for plan in loaders.plans) <= loading.MOST_KEPT
    assert all(tensor.is_meta for plan in loaders.plans for tensor in plan.judged.tensors)


def test_many_threads_read_what_one_reads(loaders, world, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "MOST_KEPT", 40)
    folders = [like(tmp_path / str(seed), world.path(PLAIN[seed % 4]), seed) for seed in range(8)]
    expected, faults = [loaders.plain(folder) for folder in folders], []

    def read(seed):
        rng = random.Random(seed)
        for _ in range(40):
            number = rng.randrange(len(folders))
            try:
                assert_same(expected[number], loaders.planned(folders[number]))
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
        known = loaders.planned(folder)
        staged = writer.pools[known]
        loaders.manager.stage(known)  # it is there already

        plain = loaders.plain(folder)
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


def test_memory_of_an_adapter_that_is_refused_is_free_again(world, tmp_path):
    loaders = Loaders(world.engine(dtype="float32"))
    writer = loaders.manager.slot_writer = Writer(loaders.manager.wrapped)
    folder = like(tmp_path / "adapter", world.path("all"), 1)
    loaders.planned(folder)
    tensors = tensors_of(folder)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, folder / WEIGHTS)
    before = writer.memory.nbytes

    for _ in range(40):
        with pytest.raises(ValueError, match="holds NaN"):
            loaders.planned(folder)

    assert writer.memory.nbytes == before
