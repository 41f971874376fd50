"""A checkpoint may hold a fused linear or a layer's experts whole or in parts, under old names or new."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.models.interfaces import WeightsMapper
from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.worlds.models import PagedRequests, token_ids, transformers_model

MIXTRAL, QWEN, PHI3 = "mixtral", "qwen3-moe-a-dense-layer", "phi3-fused"
# How a family calls gate, up and down of one expert.
PART_NAMES = {MIXTRAL: ("w1", "w3", "w2"), QWEN: ("gate_proj", "up_proj", "down_proj")}
TEXT = token_ids(20, seed=0)


def parameters_of(oracle):
    """What transformers calls the parameters, which has experts and Phi-3's linears fused."""
    return {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}


def experts_one_by_one(tensors, variant):
    """The fused experts as tensors of their own."""
    gate_name, up_name, down_name = PART_NAMES[variant]
    parts = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if not path.endswith(".experts"):
            parts[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if leaf == "down_proj":
                pieces = {down_name: weight}
            else:
                pieces = {gate_name: weight[: len(weight) // 2], up_name: weight[len(weight) // 2 :]}
            parts |= {f"{path}.{expert}.{part}.weight": w.clone() for part, w in pieces.items()}
    return parts


def block_sparse_moe(tensors):
    """Mixtral's own names."""
    return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}


def store(folder, tensors):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def logits(folder):
    model = get_model(folder, torch.float64)
    return PagedRequests(model, [TEXT]).run([[(0, len(TEXT))]])[0]


def saved(folder, variant):
    """A folder whose weights are about to be replaced, its tensors as transformers names them, its logits."""
    oracle = transformers_model(variant)
    oracle.save_pretrained(folder)
    tensors = parameters_of(oracle)
    return tensors, reference_logits(oracle, TEXT, torch.float64)


@pytest.mark.parametrize(
    ("variant", "one_by_one", "old_names"),
    [(MIXTRAL, *form) for form in itertools.product([True, False], repeat=2)]
    + [(QWEN, True, False), (QWEN, False, False)],
)
def test_experts_may_be_stored_one_by_one_or_fused(tmp_path, variant, one_by_one, old_names):
    tensors, expected = saved(tmp_path, variant)
    if one_by_one:
        tensors = experts_one_by_one(tensors, variant)
    if old_names:
        tensors = block_sparse_moe(tensors)

    store(tmp_path, tensors)

    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-9)


def test_experts_lie_gate_above_up(tmp_path):
    tensors, _ = saved(tmp_path, QWEN)
    store(tmp_path, experts_one_by_one(tensors, QWEN))

    experts = get_model(tmp_path, pack=False).model.layers[2].mlp.experts

    assert experts.w13_weight.shape == (7, 2 * 24, 48)
    assert experts.w2_weight.shape == (7, 48, 24)
    assert torch.equal(experts.w13_weight, tensors["model.layers.2.mlp.experts.gate_up_proj"])
    assert torch.equal(experts.w2_weight, tensors["model.layers.2.mlp.experts.down_proj"])


def test_phi3_may_be_stored_in_parts(tmp_path):
    tensors, expected = saved(tmp_path, PHI3)
    for name in [name for name in tensors if "qkv_proj" in name]:
        q, k, v = tensors.pop(name).split([48, 24, 24])
        parts = {"q_proj": q, "k_proj": k, "v_proj": v}
        tensors |= {name.replace("qkv_proj", part): w.clone() for part, w in parts.items()}
    for name in [name for name in tensors if "gate_up_proj" in name]:
        gate, up = tensors.pop(name).chunk(2)
        parts = {"gate_proj": gate, "up_proj": up}
        tensors |= {name.replace("gate_up_proj", part): w.clone() for part, w in parts.items()}

    store(tmp_path, tensors)

    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-9)


def test_any_model_may_be_stored_with_fused_linears_and_biases(tmp_path):
    oracle = transformers_model("llama-linear-rope-biases-tied")
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    groups = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer, (fused, parts), kind in itertools.product(range(2), groups.items(), ("weight", "bias")):
        block = f"model.layers.{layer}.{fused.split('.')[0]}"
        pieces = [tensors.pop(f"{block}.{part}.{kind}") for part in parts]
        tensors[f"model.layers.{layer}.{fused}.{kind}"] = torch.cat(pieces)

    store(tmp_path, tensors)

    expected = reference_logits(oracle, TEXT, torch.float64)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-9)


def test_packed_modules_keep_the_names_of_their_parts(tmp_path):
    saved(tmp_path, PHI3)

    model = get_model(tmp_path)

    assert model.packed_modules_mapping["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
    assert model.packed_modules_mapping["gate_up_proj"] == ["gate_proj", "up_proj"]


EXPERTS = "model.layers.0.mlp.experts"
UP_OF_5 = f"{EXPERTS}.5.up_proj.weight"
# What is done to Qwen3-MoE's tensors, its experts one by one, and how the refusal names it.
DAMAGES = {
    f"missing tensors: {UP_OF_5}$": lambda tensors: tensors.pop(UP_OF_5),
    rf"'{UP_OF_5}' has shape \(23, 48\) but the model needs \(24, 48\)": lambda tensors: tensors.update(
        {UP_OF_5: torch.ones(23, 48)}
    ),
    f"unexpected tensors: {EXPERTS}.7.up_proj.weight;": lambda tensors: tensors.update(
        {f"{EXPERTS}.7.up_proj.weight": torch.ones(24, 48)}
    ),
    f"unexpected tensors: {EXPERTS}.w13_weight;": lambda tensors: tensors.update(
        {f"{EXPERTS}.w13_weight": torch.ones(7, 48, 48)}
    ),
    f"unexpected tensors: {EXPERTS}.0.w1.weight;": lambda tensors: tensors.update(
        {f"{EXPERTS}.0.w1.weight": torch.ones(24, 48)}
    ),
    "unexpected tensors: model.layers.0.mlp.shared_expert.up_proj.weight;": lambda tensors: tensors.update(
        {"model.layers.0.mlp.shared_expert.up_proj.weight": torch.ones(24, 48)}
    ),
    "unexpected tensors: model.layers.1.mlp.gate.weight;": lambda tensors: tensors.update(
        {"model.layers.1.mlp.gate.weight": torch.ones(7, 48)}
    ),
    rf"'{EXPERTS}.*' appears in more than one file of .*, or in another form": lambda tensors: tensors.update(
        {f"{EXPERTS}.gate_up_proj": torch.ones(7, 48, 48)}
    ),
    "qkv?_proj.weight' appears in more than one file of .*, or in another": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(96, 48)}
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_experts_that_do_not_fit_are_refused_by_name(tmp_path, message):
    tensors, _ = saved(tmp_path, QWEN)
    tensors = experts_one_by_one(tensors, QWEN)

    DAMAGES[message](tensors)
    store(tmp_path, tensors)

    with pytest.raises(ValueError, match=message):
        get_model(tmp_path)


def test_fused_experts_of_another_layout_are_refused(tmp_path):
    tensors, _ = saved(tmp_path, MIXTRAL)
    name = "model.layers.1.mlp.experts.gate_up_proj"

    store(tmp_path, tensors | {name: tensors[name].transpose(1, 2).contiguous()})

    with pytest.raises(
        ValueError, match=rf"'{name}' has shape \(4, 48, 160\) but the model needs \(4, 160, 48\)"
    ):
        get_model(tmp_path)


def test_a_missing_fused_tensor_is_named_by_what_it_would_have_held(tmp_path):
    tensors, _ = saved(tmp_path, PHI3)
    del tensors["model.layers.1.self_attn.qkv_proj.weight"]
    store(tmp_path, tensors)

    names = ", ".join(f"model.layers.1.self_attn.{part}_proj.weight" for part in "kqv")
    with pytest.raises(ValueError, match=f"missing tensors: {names}$"):
        get_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.block_sparse_moe.gate", "model.layers.3.mlp.gate"),
        ("a.block_sparse_moe.block_sparse_moe.b", "a.mlp.block_sparse_moe.b"),
        ("block_sparse_moe.gate", "block_sparse_moe.gate"),
        ("language_model.model.norm", "model.norm"),
        ("my.language_model.norm", "my.language_model.norm"),
        ("old.x.gamma", "new.x.weight"),
        ("gamma.x", "gamma.x"),
        ("x.visual.y", None),
        ("draft.y", None),
        ("y.num_batches", None),
    ],
)
def test_a_weights_mapper_replaces_pieces_beginnings_and_ends(name, expected):
    mapper = WeightsMapper(
        orig_to_new_substr={".block_sparse_moe.": ".mlp.", ".visual.": None},
        orig_to_new_prefix={"language_model.": "", "old.": "new.", "draft.": None},
        orig_to_new_suffix={".gamma": ".weight", ".num_batches": None},
    )

    assert mapper._map_name(name) == expected
