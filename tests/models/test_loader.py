"""Weights reach their parameters whole, once, and in the wanted dtype, or the folder is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.worlds.models import PagedRequests, token_ids, transformers_model


@pytest.fixture
def folder(tmp_path):
    transformers_model("qwen3-wide-heads").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tied_folder(tmp_path):
    transformers_model("qwen2-tied").save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrite model.safetensors with what `change` makes of its dictionary of tensors."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def logits(folder, dtype=torch.float32):
    text = token_ids(20, seed=0)
    return PagedRequests(get_model(folder, dtype), [text]).run([[(0, 20)]])[0]


def test_fused_parameters_hold_the_checkpoints_tensors_in_order(folder):
    tensors = load_file(folder / "model.safetensors")

    model = get_model(folder, pack=False)

    layer, prefix = model.model.layers[1], "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(qkv))
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
    assert torch.equal(layer.self_attn.k_norm.weight, tensors[f"{prefix}self_attn.k_norm.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_a_sharded_checkpoint_is_the_same_model(folder, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    transformers_model("qwen3-wide-heads").save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2

    assert torch.equal(logits(sharded), logits(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_weights_are_converted_to_the_wanted_dtype(folder, stored, dtype):
    edit(folder, lambda tensors: tensors.update({name: x.to(stored) for name, x in tensors.items()}))
    original = load_file(folder / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]

    model = get_model(folder, dtype, pack=False)

    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.model.layers[0].self_attn.o_proj.weight, original.to(dtype))


def test_without_a_wanted_dtype_the_configs_is_kept(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))

    assert get_model(folder).lm_head.weight.dtype == torch.bfloat16


def test_tied_embeddings_share_one_table(tied_folder):
    model = get_model(tied_folder, pack=False)

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tied_folder / "model.safetensors")


def test_a_tied_head_that_was_saved_all_the_same_is_not_read(tied_folder):
    from transformers import AutoModelForCausalLM

    edit(tied_folder, lambda tensors: tensors.update({"lm_head.weight": torch.full((97, 48), 7.0)}))
    oracle = AutoModelForCausalLM.from_pretrained(tied_folder, dtype=torch.float32).eval()
    oracle.lm_head.weight = oracle.model.embed_tokens.weight

    expected = reference_logits(oracle, token_ids(20, seed=0), torch.float32)

    torch.testing.assert_close(logits(tied_folder), expected, rtol=1e-5, atol=1e-5)


def test_inverse_frequencies_of_old_checkpoints_are_not_needed(folder):
    before = logits(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(10)}))

    assert torch.equal(logits(folder), before)


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DAMAGES = {
    f"missing tensors: {O_PROJ}$": lambda tensors: tensors.pop(O_PROJ),
    "missing tensors: lm_head.weight$": lambda tensors: tensors.pop("lm_head.weight"),
    "missing tensors: model.layers.0.self_attn.k_proj.weight$": lambda tensors: tensors.pop(
        "model.layers.0.self_attn.k_proj.weight"
    ),
    "unexpected tensors: model.layers.0.self_attn.q_proj.bias;": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_proj.bias": torch.ones(80)}
    ),
    "unexpected tensors: .* and 4 more;": lambda tensors: tensors.update(
        {f"model.layers.{i}.mlp.router.weight": torch.ones(1) for i in range(12)}
    ),
    rf"'{O_PROJ}' has shape \(48, 79\) but the model needs \(48, 80\)": lambda tensors: tensors.update(
        {O_PROJ: torch.ones(48, 79)}
    ),
    rf"'{O_PROJ}' has dtype torch.int8": lambda tensors: tensors.update(
        {O_PROJ: torch.ones(48, 80, dtype=torch.int8)}
    ),
    rf"'{O_PROJ}' has dtype torch.float8_e4m3fn": lambda tensors: tensors.update(
        {O_PROJ: torch.ones(48, 80).to(torch.float8_e4m3fn)}
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(folder, message):
    edit(folder, DAMAGES[message])

    with pytest.raises(ValueError, match=message):
        get_model(folder)


def test_a_missing_weights_file_is_named(folder):
    (folder / "model.safetensors").unlink()

    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist; only safetensors"):
        get_model(folder)


def test_a_missing_shard_is_named_before_anything_is_read(folder):
    names = {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002\.safetensors"):
        get_model(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
    save_file({O_PROJ: torch.ones(48, 80)}, folder / "more.safetensors")
    names = {"a": "model.safetensors", "b": "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    with pytest.raises(ValueError, match=f"'{O_PROJ}' appears in more than one file"):
        get_model(folder)


def test_a_truncated_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])

    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        get_model(folder)
