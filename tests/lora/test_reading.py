"""Reading an adapter folder for this engine: what it brings. Refusals: test_bad_adapters, test_refusals."""

import pytest
import torch
from torch import nn

from minivllm.lora.request import LoRARequest
from tests.tools.watching import Products
from tests.worlds.managers import (
    HIDDEN,
    SHAPES,
    SLICES,
    Folders,
    assert_slot_holds,
    make_worker,
    random_weights,
    save_folder,
)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def test_a_folder_becomes_the_weights_of_its_slot(folders):
    worker = make_worker(slots=2)

    worker.add_adapter(folders.request(5))

    assert_slot_holds(worker.manager, 0, folders.weights[5], "adapter 5")
    assert worker.manager.get_lora_info(5)["name"] == "adapter-5"


def test_a_folder_that_peft_saved_serves_what_peft_computes(tmp_path):
    """The oracle is PEFT's own layer: its A, its B and its scaling, by rsLoRA and patterns."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Module()
    base.attn, base.mlp = nn.Module(), nn.Module()
    for name, (k, n) in SHAPES.items():
        base.set_submodule(name, nn.Linear(k, n), strict=False)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj"],
        rank_pattern={"o_proj": 2},
        alpha_pattern={"up_proj": 11},
        init_lora_weights=False,
    )
    peft_model = get_peft_model(base, config)
    peft_model.save_pretrained(tmp_path / "saved")
    worker = make_worker(slots=1)

    worker.add_adapter(LoRARequest("peft", 1, str(tmp_path / "saved")))

    for module, slices in SLICES.items():
        layer = worker.manager.modules[module]
        for i, (name, k, n) in enumerate(slices):
            peft_layer = peft_model.base_model.model.get_submodule(name)
            adapted = hasattr(peft_layer, "lora_A")
            expected = peft_layer.get_delta_weight("default") if adapted else torch.zeros(n, k)
            delta = layer.lora_b_stacked[i][0, 0] @ layer.lora_a_stacked[i][0, 0]  # (N_i, K)
            torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_adapters_are_kept_in_the_dtype_of_the_slots(folders, dtype):
    worker = make_worker(slots=1, lora_dtype=dtype)

    worker.add_adapter(folders.request(1))

    lora = worker.manager.get_adapter(1)
    tensors = [t for w in lora.loras.values() for t in as_list(w.lora_a) + as_list(w.lora_b) if t is not None]
    expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert {t.dtype for t in tensors} == {expected}


def as_list(weights):
    return weights if isinstance(weights, list) else [weights]


def test_every_load_has_an_identity_of_its_own(folders):
    worker = make_worker(slots=3)

    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))
    first = {adapter_id: lora.load_id for adapter_id, lora in worker.manager.list_adapters().items()}
    worker.remove_adapter(1)
    worker.add_adapter(folders.request(1))

    again = worker.manager.get_adapter(1).load_id
    assert len({*first.values(), again}) == 3


def test_modules_that_the_server_does_not_wrap_are_refused(folders):
    """Incident 22: the adapter would load and the base model be served in its name."""
    worker = make_worker(slots=1, target_modules=["down_proj"])
    weights = random_weights(2)
    weights.pairs = {"attn.o_proj": (torch.ones(weights.rank, 8), torch.ones(HIDDEN, weights.rank))}
    save_folder(folders.root / "attn", weights)

    with pytest.raises(ValueError, match=r"adapter 'attn': .*target_modules=\['down_proj'\]"):
        worker.add_adapter(LoRARequest("attn", 2, str(folders.root / "attn")))

    assert worker.list_adapters() == set()


def test_what_only_the_numbers_tell_is_found_when_they_are_read(folders):
    weights = random_weights(2)
    next(iter(weights.pairs.values()))[1][0, 0] = float("nan")
    save_folder(folders.root / "nan", weights)
    request = LoRARequest("nan", 2, str(folders.root / "nan"))
    worker = make_worker(slots=1)

    worker.source.check(request)
    with pytest.raises(ValueError, match="NaN"):
        worker.add_adapter(request)

    assert worker.list_adapters() == set()


def test_a_check_keeps_and_counts_nothing(folders):
    worker = make_worker(slots=1)

    worker.source.check(folders.request(1))

    assert worker.list_adapters() == set()
    assert worker.manager.stats.loads == 0


def test_a_check_multiplies_nothing(folders):
    """Shapes have no numbers to scale; the first product of tensors without any would cost a second."""
    worker = make_worker(slots=1)

    with Products() as checking:
        worker.source.check(folders.request(1))
    with Products() as loading:
        worker.add_adapter(folders.request(1))

    assert checking.found == []
    assert loading.found != []


def test_a_path_relative_to_the_working_directory_is_found(folders, monkeypatch):
    folders.request(1)
    monkeypatch.chdir(folders.root)
    worker = make_worker(slots=1)

    worker.add_adapter(LoRARequest("here", 1, "1"))

    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")
