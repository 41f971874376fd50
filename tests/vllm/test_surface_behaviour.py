"""What vLLM's own unit tests rely on, on a model made as those tests make theirs, against float64 sums row by row."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead
from minivllm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.request import LoRARequest
from minivllm.models.interfaces import SupportsLoRA
from minivllm.vllm.layers import LoRAMapping
from minivllm.vllm.model_manager import (
    DEFAULT_LANGUAGE_WRAPPER_KEY,
    LoRAModelManager,
    LRUCacheLoRAModelManager,
)
from minivllm.vllm.punica_selector import get_punica_wrapper
from minivllm.vllm.utils import from_layer_logits_processor
from minivllm.vllm.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE

VOCAB, DTYPE = 40, torch.float64


class DummyLoRAModel(nn.Sequential, SupportsLoRA):
    """As vLLM's tests make theirs."""


@pytest.fixture
def model():
    inner = nn.Sequential()
    inner.add_module("dense1", ColumnParallelLinear(10, 12, params_dtype=DTYPE))
    inner.add_module("dense2", RowParallelLinear(12, 10, params_dtype=DTYPE))
    model = DummyLoRAModel()
    model.add_module("dense1", ColumnParallelLinear(14, 10, params_dtype=DTYPE, prefix="dense1"))
    model.add_module("layer1", inner)
    model.add_module("act", nn.ReLU())
    model.add_module("output", ColumnParallelLinear(10, 6, params_dtype=DTYPE))
    model.add_module("lm_head", ParallelLMHead(VOCAB, 6, params_dtype=DTYPE))
    model.add_module("logits_processor", LogitsProcessor(VOCAB))
    # What such models say of themselves may be anything.
    model.config = MagicMock()
    model.embedding_modules = {"lm_head": "lm_head"}
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=DTYPE, generator=generator)
    return model


SHAPES = {"dense1": (14, 10), "layer1.dense2": (12, 10), "lm_head": (6, VOCAB)}
IDS = [2, 0, 1, 1, 0, 2]


def random_pairs(seed, rank):
    """Module -> A (r, K) and B (N, r)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, width, dtype=DTYPE, generator=generator),
            torch.randn(height, rank, dtype=DTYPE, generator=generator),
        )
        for name, (width, height) in SHAPES.items()
    }


def adapter_of(adapter_id, pairs, rank, alpha=1.0):
    loras = {
        name: LoRALayerWeights(name, rank, alpha, a.clone(), b.clone()) for name, (a, b) in pairs.items()
    }
    return LoRAModel(adapter_id, rank, loras)


def run(model, x):
    """The model by hand, whatever its layers have become; the logits of all rows.   x: (T, 14) -> (T, V)"""
    x, _ = model.dense1(x)
    x, _ = model.layer1.dense1(x)
    x, _ = model.layer1.dense2(x)
    x, _ = model.output(model.act(x))
    return model.logits_processor(model.lm_head, x)


def expected_logits(model, x, of_row):
    """Row by row from the base weights and (A, B, scaling) of each row's modules, in float64."""

    def linear(name, of, row):
        layer = model.get_submodule(name)
        layer = getattr(layer, "base_layer", layer)
        y = layer.weight @ row if layer.bias is None else layer.weight @ row + layer.bias
        if name in of:
            lora_a, lora_b, scaling = of[name]
            y = y + scaling * (lora_b @ (lora_a @ row))
        return y

    rows = []
    for row, of in zip(x, of_row, strict=True):
        for name in ("dense1", "layer1.dense1", "layer1.dense2"):
            row = linear(name, of, row)
        rows.append(linear("lm_head", of, linear("output", of, row.relu())))
    return torch.stack(rows)


def make_manager(model, cls=LRUCacheLoRAModelManager, **options):
    config = LoRAConfig(
        **{"max_lora_rank": 4, "max_loras": 2, "max_cpu_loras": 3, "lora_dtype": DTYPE, **options}
    )
    return cls(model, 8, 16, VOCAB, config, "cpu")


def assert_answers(model, manager, adapters, ids=IDS):
    """Each row of a mixed batch has its own adapter's logits.   adapters: id -> module -> (A, B, scaling)"""
    x = torch.randn(len(ids), 14, dtype=DTYPE, generator=torch.Generator().manual_seed(9))
    expected = expected_logits(model, x, [adapters.get(i, {}) for i in ids])
    manager.set_adapter_mapping(LoRAMapping(list(ids), list(ids), is_prefill=True))
    assert_rows_equal(run(model, x), expected, labels=[f"adapter {i}" for i in ids], tolerance=1e-12)


@pytest.mark.parametrize("cls", [LoRAModelManager, LRUCacheLoRAModelManager])
@pytest.mark.parametrize("backend", ["loops", "grouped"])
def test_a_manager_serves_a_model_made_as_in_vllms_tests(model, cls, backend):
    """Down to the output embedding, whose adapters are in the logits processor's hands."""
    manager = make_manager(model, cls, punica_backend=backend)
    ranks = {1: 4, 2: 3}
    pairs = {i: random_pairs(i, rank) for i, rank in ranks.items()}
    del pairs[2]["dense1"]

    for adapter_id, of in pairs.items():
        assert manager.add_adapter(adapter_of(adapter_id, of, ranks[adapter_id], alpha=6.0))
        assert manager.activate_adapter(adapter_id)

    scaled = {i: {name: (a, b, 6 / ranks[i]) for name, (a, b) in of.items()} for i, of in pairs.items()}
    assert manager.lora_index_to_id == [1, 2]
    assert_answers(model, manager, scaled)


def test_what_adapters_may_target_is_every_linear_and_the_embeddings_that_the_model_names(model):
    model.embed_tokens = model.lm_head

    manager = make_manager(model)

    assert sorted(manager.supported_lora_modules) == ["dense1", "dense2", "lm_head", "output"]
    assert set(manager.modules) == {"dense1", "layer1.dense1", "layer1.dense2", "output", "lm_head"}
    assert manager.modules["lm_head"] is model.logits_processor
    assert model.embed_tokens is model.lm_head, "the head itself is left alone"


def test_a_shared_router_of_a_models_own_kind_gets_one_wrapper(model):
    class Router(ReplicatedLinear):
        pass

    model.moe = nn.Module()
    model.moe.gate = Router(10, 4, bias=False, params_dtype=DTYPE)
    model.moe.runner = nn.Module()
    model.moe.runner.gate = model.moe.gate

    manager = make_manager(model)

    assert type(model.moe.gate).__name__ == "ReplicatedLinearWithLoRA"
    assert model.moe.gate is model.moe.runner.gate is manager.modules["moe.gate"]
    assert "moe.runner.gate" not in manager.modules


def test_a_dummy_adapter_covers_everything_fits_and_changes_nothing(model):
    manager = make_manager(model)

    dummy = manager.create_dummy_lora(1, 3, {"lm_head": "output_embeddings"})

    assert set(dummy.loras) == set(manager.modules)
    assert {lora.rank for lora in dummy.loras.values()} == {3}
    manager.add_adapter(dummy)
    manager.activate_adapter(1)
    assert_answers(model, manager, {}, ids=[1, 0, 1])


def test_devices_and_sizes_are_told_as_they_were_given(model):
    manager = make_manager(model)

    assert (manager.capacity, manager.lora_slots, manager.device) == (3, 2, "cpu")
    assert manager.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY].device == "cpu"
    assert manager.lora_index_to_id == [None, None]
    assert manager.get_free_slots() == [0, 1]


def write_adapter(folder, pairs, rank, alpha):
    folder.mkdir()
    names = {
        f"base_model.model.{name}.lora_{side}.weight": t
        for name, pair in pairs.items()
        for side, t in zip("AB", pair)
    }
    save_file(names, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": list(pairs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("cls", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
def test_a_worker_manager_serves_from_a_config_that_has_four_things_and_no_more(model, cls, tmp_path):
    """`lora_config`, the vocabulary's size, `max_num_seqs` and `max_num_batched_tokens`; the model's own is a mock."""
    config = SimpleNamespace(
        lora_config=LoRAConfig(max_lora_rank=4, max_loras=2, max_cpu_loras=2, lora_dtype=DTYPE),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16),
    )
    worker = cls(config, "cpu", {"lm_head": "output_embeddings"})
    pairs = {1: random_pairs(1, rank=4), 2: random_pairs(2, rank=2)}
    requests = [
        LoRARequest(f"adapter-{i}", i, write_adapter(tmp_path / str(i), of, len(of["lm_head"][0]), 3))
        for i, of in pairs.items()
    ]

    assert worker.create_lora_manager(model) is model
    worker.set_active_adapters(set(requests), LoRAMapping([], []))

    scaled = {i: {name: (a, b, 3 / len(a)) for name, (a, b) in of.items()} for i, of in pairs.items()}
    assert worker.list_adapters() == {1, 2}
    assert_answers(model, worker.manager, scaled)


@pytest.mark.parametrize("backend", ["loops", "grouped", "triton"])
def test_from_layer_logits_processor_adds_each_sampled_rows_own_adapter(backend):
    dtype, device = (torch.float32, DEVICE) if backend == "triton" else (DTYPE, "cpu")
    config = LoRAConfig(max_lora_rank=5, max_loras=3, lora_dtype=dtype, punica_backend=backend)
    generator = torch.Generator().manual_seed(3)
    head = ParallelLMHead(num_embeddings=VOCAB, embedding_dim=24, params_dtype=dtype, device=device)
    head.weight.data = torch.randn(VOCAB, 24, generator=generator).to(device, dtype)
    layer = from_layer_logits_processor(LogitsProcessor(VOCAB), head, 3, config)
    backend = get_punica_wrapper(16, 8, device, lora_config=config)
    layer.set_mapping(backend)
    pairs = {
        i: (torch.randn(r, 24, generator=generator), torch.randn(VOCAB, r, generator=generator))
        for i, r in ((7, 5), (8, 2))
    }
    layer.set_lora(0, lora_a=pairs[7][0].to(dtype), lora_b=pairs[7][1].to(dtype))
    layer.set_lora(2, lora_a=pairs[8][0].to(dtype), lora_b=pairs[8][1].to(dtype))
    x = torch.randn(4, 24, generator=generator).to(dtype)
    bias = torch.randn(VOCAB, generator=generator).to(dtype)
    ids = [8, 0, 7, 8]

    # More tokens than sampled rows: the rows here are the sampled ones.
    backend.update_metadata(LoRAMapping([7, 7, 8, 0, 7, 8], ids), [7, None, 8], 4, VOCAB)
    logits = layer._get_logits(hidden_states=x.to(device), lm_head=head, embedding_bias=bias.to(device))

    expected = x.double() @ head.weight.double().cpu().T + bias.double()
    for row, i in enumerate(ids):
        if i:
            expected[row] += pairs[i][1].double() @ (pairs[i][0].double() @ x[row].double())
    assert type(layer).__name__ == "LogitsProcessorWithLoRA"
    assert_rows_equal(logits, expected, labels=[f"adapter {i}" for i in ids], tolerance=3e-6)
