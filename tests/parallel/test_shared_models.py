"""A model that processes share answers as one process does. Here threads play the processes."""

import pytest
import torch

from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS, get_model
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.oracles.peft import reference_logits
from tests.worlds.models import VARIANTS, PagedRequests, token_ids, transformers_model
from tests.worlds.ranks import in_lockstep

TEXTS = [token_ids(n, seed=n) for n in (9, 1, 14)]
STEPS = [[(0, 5), (1, 1)], [(0, 4), (2, 9)], [(2, 5)]]
MOE = {
    "model_type": "qwen3_moe",
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def folder_of(variant, **overrides):
        folder = tmp_path_factory.getbasetemp() / "shared" / f"{variant}-{len(overrides)}"
        if not folder.exists():
            transformers_model(variant, **overrides).save_pretrained(folder)
        return folder

    return folder_of


def answers(folder, dtype, size):
    def work(tp):
        return PagedRequests(get_model(folder, dtype, tp=tp), TEXTS).run(STEPS)

    return in_lockstep(size, work)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_has_the_logits_that_transformers_computes(folder_of, variant, size):
    expected = [reference_logits(transformers_model(variant), text, torch.float64) for text in TEXTS]

    for logits in answers(folder_of(variant), torch.float64, size):
        for found, reference in zip(logits, expected, strict=True):
            assert torch.allclose(found, reference, rtol=1e-9, atol=1e-9)


def test_a_process_has_its_share_of_every_weight_and_of_the_cache(folder_of):
    whole = get_model(folder_of("llama-llama3-rope"), pack=False)

    parts = in_lockstep(2, lambda tp: get_model(folder_of("llama-llama3-rope"), pack=False, tp=tp))

    for rank, model in enumerate(parts):
        layer, all_of = model.model.layers[1], whole.model.layers[1]
        q, k, v = all_of.self_attn.qkv_proj.weight.split([48, 24, 24])
        own = [half.chunk(2)[rank] for half in (q, k, v)]
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(own))
        assert torch.equal(layer.self_attn.o_proj.weight, all_of.self_attn.o_proj.weight.chunk(2, 1)[rank])
        assert torch.equal(layer.mlp.down_proj.weight, all_of.mlp.down_proj.weight.chunk(2, 1)[rank])
        assert layer.self_attn.attn.kv_cache_shape(7, 4) == (7, 4, 2 * 1, 12)
    tables = torch.cat([model.model.embed_tokens.weight for model in parts])
    assert torch.equal(tables[:97], whole.model.embed_tokens.weight)
    assert torch.equal(tables[97:], torch.zeros(1, 48)), "97 tokens are no two equal shares"


def test_only_what_a_process_has_is_read(folder_of, monkeypatch):
    from minivllm.models import loader

    read, all_tensors = [], loader.iterate_tensors

    class Watched:
        def __init__(self, source):
            self.source, self.get_shape = source, source.get_shape

        def __getitem__(self, index):
            read.append(self.source[index])
            return read[-1]

    def watched(folder):
        return ((name, Watched(source)) for name, source in all_tensors(folder))

    monkeypatch.setattr(loader, "iterate_tensors", watched)

    model = get_model(folder_of("mixtral"), pack=False, tp=TensorParallel(1, 4))

    assert sum(tensor.numel() for tensor in read) == sum(p.numel() for p in model.parameters())


def test_one_key_value_head_is_on_every_process(folder_of):
    parts = in_lockstep(4, lambda tp: get_model(folder_of("mistral-one-kv-head"), pack=False, tp=tp))

    keys = [model.model.layers[0].self_attn.qkv_proj.weight[12:24] for model in parts]
    assert all(torch.equal(keys[0], others) for others in keys[1:])


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "num_attention_heads 9 .*_size 2; .* 1"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 4, "num_attention_heads 9 .*_size 4; .* 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads 3 .*_size 2; .* 1"),
        ({"intermediate_size": 33}, 2, "gate_up_proj outputs 33 .*_size 2"),
    ],
)
def test_a_size_that_does_not_divide_a_model_is_refused_by_name(sizes, size, message):
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 36,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        **sizes,
    }
    architecture = ModelArchitecture.from_dict(config)

    with pytest.raises(ValueError, match=message):
        MODELS[architecture.architecture](architecture, torch.float32, "meta", TensorParallel(0, size))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (6, 3), (8, 1), (12, 4)])
@pytest.mark.parametrize(
    "more", [{"intermediate_size": 48}, {"intermediate_size": 33}, MOE, {**MOE, "mlp_only_layers": [0]}]
)
def test_an_architecture_refuses_just_the_sizes_that_its_layers_would(heads, kv_heads, more):
    architecture = ModelArchitecture.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            **more,
        }
    )

    def refuses(check, size):
        try:
            check(size)
        except ValueError:
            return True
        return False

    def make_layers(size):
        MODELS[architecture.architecture](architecture, torch.float32, "meta", TensorParallel(0, size))

    sizes = range(1, 14)
    foretold = [size for size in sizes if refuses(architecture.refuse_uneven_shares, size)]
    assert foretold == [size for size in sizes if refuses(make_layers, size)]


@pytest.mark.parametrize("variant", ["llama-linear-rope-biases-tied", "qwen3-moe-a-dense-layer"])
def test_dummy_weights_are_parts_of_the_same_model(folder_of, variant):
    def outputs(size):
        def work(tp):
            model = get_model(folder_of(variant), torch.float64, load_format="dummy", seed=5, tp=tp)
            return PagedRequests(model, TEXTS).run(STEPS)

        return in_lockstep(size, work)

    (alone,) = outputs(1)

    for logits in outputs(2):
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(logits, alone, strict=True))


def test_a_layer_waits_for_others_once_behind_attention_and_once_behind_the_mlp(folder_of):
    def work(tp):
        requests = PagedRequests(get_model(folder_of("llama-llama3-rope"), tp=tp), TEXTS)
        tp.calls.clear()
        requests.step([(0, 9)])
        return tp.calls

    hidden = ("all_reduce", 9 * 48)
    for calls in in_lockstep(2, work):
        assert calls == [hidden] * (1 + 2 * 2) + [("all_gather", 9 * 49)]
