"""An adapter as a whole: modules by name, identity, and weights that are the engine's own (lab 1.6)."""

import pytest
import torch
from adapter_folders import DOWN, PREFIX, RANK, WIDTHS, Q, V, good_config, good_tensors, load, write
from safetensors.torch import save_file

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper


def from_tensors(tensors, adapter_id=1, **options):
    return LoRAModel.from_lora_tensors(adapter_id, tensors, PEFTHelper.from_dict(good_config()), **options)


@pytest.mark.lab("1.6")
def test_every_module_holds_its_own_tensors_whatever_their_order_in_the_file():
    tensors = good_tensors()
    b_before_a = dict(sorted(tensors.items(), reverse=True))

    lora = from_tensors(b_before_a)

    assert lora.loras.keys() == WIDTHS.keys()
    for module in WIDTHS:
        assert torch.equal(lora.loras[module].lora_a, tensors[f"{PREFIX}{module}.lora_A.weight"])
        assert torch.equal(lora.loras[module].lora_b, tensors[f"{PREFIX}{module}.lora_B.weight"])
        assert lora.loras[module].module_name == module
        assert lora.loras[module].scaling == 2


@pytest.mark.lab("1.6")
def test_names_without_pefts_prefix_mean_the_same():
    with_prefix = from_tensors(good_tensors())
    without = from_tensors({name.removeprefix(PREFIX): tensor for name, tensor in good_tensors().items()})

    assert with_prefix.loras.keys() == without.loras.keys()
    assert all(torch.equal(with_prefix.loras[m].lora_b, without.loras[m].lora_b) for m in WIDTHS)


@pytest.mark.lab("1.6")
def test_the_same_tensor_with_and_without_the_prefix_is_refused():
    tensors = good_tensors()
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{PREFIX}{Q}.lora_A.weight"] + 1

    with pytest.raises(ValueError, match=f"{Q}.lora_A.weight is there twice"):
        from_tensors(tensors)


@pytest.mark.lab("1.6")
def test_modules_under_skipped_prefixes_are_left_out_whatever_they_hold():
    """Such as the layers of speculative heads that the engine does not run."""
    tensors = {
        **good_tensors(),
        f"{PREFIX}mtp.layers.0.q_proj.lora_A.weight": torch.ones(2, 2),
        "mtp.norm.weight": torch.ones(2),
    }

    lora = from_tensors(tensors, skip_prefixes=["mtp."])

    assert lora.loras.keys() == WIDTHS.keys()
    with pytest.raises(ValueError, match="holds no LoRA weights"):
        from_tensors(tensors, skip_prefixes=["model.", "mtp."])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_asked_for(dtype):
    lora = from_tensors(good_tensors(torch.float32), dtype=dtype)

    assert {lora.loras[m].lora_a.dtype for m in WIDTHS} == {dtype}
    assert {lora.loras[m].lora_b.dtype for m in WIDTHS} == {dtype}


def test_an_adapter_is_looked_up_by_module():
    lora = from_tensors(good_tensors(), adapter_id=5)

    assert lora.id == 5
    assert lora.rank == RANK
    assert lora.get_lora(V) is lora.loras[V]
    assert lora.get_lora("model.layers.9.mlp.up_proj") is None
    assert lora.check_lora_name(DOWN) and not lora.check_lora_name("down_proj")
    assert lora.nbytes == 4 * sum(RANK * (width_in + width_out) for width_in, width_out in WIDTHS.values())


@pytest.mark.parametrize("adapter_id", [0, -3])
def test_an_id_below_1_is_refused(adapter_id):
    with pytest.raises(ValueError, match=f"greater than 0, got {adapter_id}"):
        LoRAModel(adapter_id, 4, {})


def test_a_clone_shares_the_tensors_and_nothing_that_changes():
    lora = from_tensors(good_tensors(), adapter_id=5)

    clone = lora.clone(6)
    clone.loras.pop(Q)

    assert (clone.id, clone.rank) == (6, RANK)
    assert clone.loras[V].lora_a is lora.loras[V].lora_a
    assert lora.check_lora_name(Q)


def test_no_two_loads_have_the_same_identity():
    """Names and ids come back with other weights; caches of results are keyed by this."""
    tensors = good_tensors()
    first, second = from_tensors(tensors), from_tensors(tensors)

    assert len({first.load_id, second.load_id, first.clone(1).load_id}) == 3


def test_writing_over_the_file_does_not_change_an_adapter_that_is_loaded(tmp_path):
    """A trainer that saves into the folder it saved into before."""
    folder = write(tmp_path / "adapter")
    loaded = load(folder)
    before = {m: (lora.lora_a.clone(), lora.lora_b.clone()) for m, lora in loaded.loras.items()}
    file = folder / "adapter_model.safetensors"

    with open(file, "r+b") as opened:  # in place: no new file under the old name
        size = file.stat().st_size
        opened.seek(size // 2)
        opened.write(b"\x11" * (size - size // 2))

    for module, (lora_a, lora_b) in before.items():
        assert torch.equal(loaded.loras[module].lora_a, lora_a)
        assert torch.equal(loaded.loras[module].lora_b, lora_b)


def test_a_bin_file_of_tensors_is_read_like_safetensors(tmp_path):
    expected = load(write(tmp_path / "safe"))
    folder = write(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in good_tensors().items()}

    for name in ("adapter_model.pt", "adapter_model.bin"):
        torch.save(parameters, folder / name)
        lora = load(folder)
        (folder / name).unlink()

        for module in WIDTHS:
            assert torch.equal(lora.loras[module].lora_a, expected.loras[module].lora_a)
            assert torch.equal(lora.loras[module].lora_b, expected.loras[module].lora_b)
            assert not lora.loras[module].lora_b.requires_grad


def test_safetensors_are_preferred_to_a_pickle_beside_them(tmp_path):
    folder = write(tmp_path / "adapter")
    torch.save({name: tensor + 1 for name, tensor in good_tensors().items()}, folder / "adapter_model.bin")

    lora = load(folder)

    assert torch.equal(lora.loras[Q].lora_a, good_tensors()[f"{PREFIX}{Q}.lora_A.weight"])


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_shapes_alone_can_be_read_without_the_numbers(weights, tmp_path):
    folder = write(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    save = save_file if weights.endswith(".safetensors") else torch.save
    save(good_tensors(torch.bfloat16), folder / weights)

    lora = load(folder, shapes_only=True)

    for module, (width_in, width_out) in WIDTHS.items():
        assert lora.loras[module].lora_a.is_meta and lora.loras[module].lora_b.is_meta
        assert lora.loras[module].lora_a.shape == (RANK, width_in)
        assert lora.loras[module].lora_b.shape == (width_out, RANK)
