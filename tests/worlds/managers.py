"""A model of four linears, random adapters for it in memory and on disk, and what a slot must hold of them.

The expected slot contents are put together from the raw A and B here, with nothing of the managers.
"""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from tests.oracles.rows import assert_rows_equal

HIDDEN, RANK = 6, 5
# Module -> slices in order: the checkpoint's name, input width, output width.
SLICES = {
    "attn.qkv_proj": [("attn.q_proj", HIDDEN, 8), ("attn.k_proj", HIDDEN, 4), ("attn.v_proj", HIDDEN, 4)],
    "attn.o_proj": [("attn.o_proj", 8, HIDDEN)],
    "mlp.gate_up_proj": [("mlp.gate_proj", HIDDEN, 7), ("mlp.up_proj", HIDDEN, 7)],
    "mlp.down_proj": [("mlp.down_proj", 7, HIDDEN)],
}
SHAPES = {name: (k, n) for slices in SLICES.values() for name, k, n in slices}


class SmallModel(nn.Module):
    supports_lora = True
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv_proj = QKVParallelLinear(HIDDEN, 4, 2, 1, bias=False)
        self.attn.o_proj = RowParallelLinear(8, HIDDEN, bias=False)
        self.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [7, 7], bias=False)
        self.mlp.down_proj = RowParallelLinear(7, HIDDEN, bias=False)


def make_manager(slots, memory=None, cls=LRUCacheLoRAModelManager, **lora_options):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=slots, max_cpu_loras=memory, **lora_options)
    return cls(SmallModel(), 8, 64, 97, config, "cpu")


def make_plain_manager(slots, memory=None):
    return make_manager(slots, memory, LoRAModelManager)


def make_worker(slots, memory=None, cls=LRUCacheWorkerLoRAManager, **lora_options):
    """A worker manager on a config that has nothing but what may be read of it."""
    config = SimpleNamespace(
        lora_config=LoRAConfig(max_lora_rank=RANK, max_loras=slots, max_cpu_loras=memory, **lora_options),
        model_config=SimpleNamespace(get_vocab_size=lambda: 97),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
    )
    worker = cls(config, "cpu", {})
    worker.create_lora_manager(SmallModel())
    return worker


# ---- adapters -----------------------------------------------------------------------------------------------


def random_weights(seed):
    """Checkpoint name -> A (r, K), B (N, r) for some of the modules; one rank and one alpha for all."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, RANK + 1))
    alpha = float(rng.integers(1, 9)) + 0.5
    chosen = [name for name in SHAPES if rng.random() < 0.6] or ["attn.o_proj"]
    pairs = {}
    for name in chosen:
        k, n = SHAPES[name]
        a = rng.standard_normal((rank, k), dtype=np.float32)
        b = rng.standard_normal((n, rank), dtype=np.float32)
        pairs[name] = torch.from_numpy(a), torch.from_numpy(b)
    return SimpleNamespace(rank=rank, alpha=alpha, pairs=pairs)


def adapter_of(adapter_id, weights):
    """A LoRAModel with tensors of its own."""
    loras = {
        name: LoRALayerWeights(name, weights.rank, weights.alpha, a.clone(), b.clone())
        for name, (a, b) in weights.pairs.items()
    }
    return LoRAModel(adapter_id, weights.rank, loras)


def make_adapter(adapter_id, seed=None):
    return adapter_of(adapter_id, random_weights(adapter_id if seed is None else seed))


def save_folder(folder: Path, weights) -> Path:
    """The weights as PEFT lays out a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in weights.pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": weights.rank,
        "lora_alpha": weights.alpha,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in weights.pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Folders:
    """Adapter folders by id, and requests that name them; `weights[id]` is what is in the file now."""

    def __init__(self, root: Path):
        self.root = root
        self.weights = {}

    def request(self, adapter_id, **options):
        if adapter_id not in self.weights:
            self.write(adapter_id, seed=adapter_id)
        return LoRARequest(f"adapter-{adapter_id}", adapter_id, str(self.root / str(adapter_id)), **options)

    def requests(self, *adapter_ids):
        return [self.request(adapter_id) for adapter_id in adapter_ids]

    def write(self, adapter_id, seed):
        self.weights[adapter_id] = random_weights(seed)
        save_folder(self.root / str(adapter_id), self.weights[adapter_id])

    def damage(self, adapter_id):
        self.request(adapter_id)
        (self.root / str(adapter_id) / "adapter_model.safetensors").write_bytes(b"no adapter")


# ---- slots --------------------------------------------------------------------------------------------------


def expected_slot(weights):
    """(module, slice) -> A (R, K), B (N, R) of a slot: scaling in B, zeros past the rank and in other slices."""
    contents = {}
    for module, slices in SLICES.items():
        for i, (name, k, n) in enumerate(slices):
            padded_a, padded_b = torch.zeros(RANK, k), torch.zeros(n, RANK)
            if name in weights.pairs:
                a, b = weights.pairs[name]
                padded_a[: weights.rank] = a
                padded_b[:, : weights.rank] = b * (weights.alpha / weights.rank)
            contents[module, i] = padded_a, padded_b
    return contents


def assert_slot_holds(manager, slot, weights, whose):
    """A slot's buffers are, bit for bit, what these weights make of them; None = an empty slot.

    whose   whose weights they are, in a few words
    """
    __tracebackhide__ = True
    expected = expected_slot(weights or SimpleNamespace(pairs={}))
    for (module, i), (a, b) in expected.items():
        layer = manager.modules[module]
        found = layer.lora_a_stacked[i][slot, 0], layer.lora_b_stacked[i][slot, 0]
        for side, got, want in zip("AB", found, (a, b)):
            if not torch.equal(got, want):
                what = f"slot {slot} should hold {whose}; lora_{side} of {module}, slice {i}"
                assert_rows_equal(got, want, what=what)


@contextmanager
def refusal(kind, why):
    """What is inside raises such an error. `why` says why it should."""
    __tracebackhide__ = True
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{why}: a {kind.__name__} was expected, and nothing was raised")


def assert_slots(manager, expected, why):
    """The slot table. `why` says why it should be so."""
    __tracebackhide__ = True
    found = manager.lora_index_to_id
    assert found == expected, f"{why}\n  slots expected {expected}\n  slots found    {found}"


def assert_memory(manager, expected, why):
    """Which adapters are in memory, in whatever order. `why` says why it should be so."""
    __tracebackhide__ = True
    found = sorted(manager.list_adapters())
    assert found == expected, f"{why}\n  memory expected {expected}\n  memory found    {found}"


def fail_copies(monkeypatch, manager, module="mlp.gate_up_proj", error=OSError):
    """From now on the copy into this layer fails: those before it have been written already."""

    def fail(*args, **kwargs):
        raise error("device lost")

    monkeypatch.setattr(manager.modules[module], "write", fail)


def count_copies(monkeypatch, manager):
    """A list that grows by the slot of every adapter copied; each random adapter is written layer by layer."""
    slots = []
    write = manager.wrapped.write

    def counted(lora, slot):
        slots.append(slot)
        write(lora, slot)

    monkeypatch.setattr(manager.wrapped, "write", counted)
    return slots


def count_reads(monkeypatch):
    """A list that grows by the id of every adapter whose weights are read from disk."""
    ids = []
    read = AdapterSource._read

    def counted(source, lora_request, *args):
        ids.append(lora_request.lora_int_id)
        return read(source, lora_request, *args)

    monkeypatch.setattr(AdapterSource, "_read", counted)
    return ids
