"""Sparse models in every shape they come in: which layers have experts, and how many of them a token runs."""

import pytest
import torch

from minivllm import EngineArgs, LLMEngine
from minivllm.layers.fused_moe import FusedMoE
from minivllm.models.llama import LlamaMLP
from minivllm.models.moe import SparseMoeBlock
from minivllm.models.registry import get_model
from tests.oracles.peft import all_in_float64, reference_logits
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.models import PagedRequests, token_ids, transformers_model

MIXTRAL, QWEN = "mixtral", "qwen3-moe-a-dense-layer"
LENGTHS = [23, 5, 1]
# What differs from VARIANTS, and which layers have experts.
SHAPES = {
    "one expert a token": (MIXTRAL, {"num_experts_per_tok": 1}, [0, 1]),
    "every expert a token": (MIXTRAL, {"num_experts_per_tok": 4}, [0, 1]),
    "a single expert": (MIXTRAL, {"num_local_experts": 1, "num_experts_per_tok": 1}, [0, 1]),
    "more experts than tokens": (MIXTRAL, {"num_local_experts": 60}, [0, 1]),
    "weights that sum to one": (QWEN, {"norm_topk_prob": True}, [0, 2]),
    "one expert, its weight as it is": (QWEN, {"num_experts_per_tok": 1}, [0, 2]),
    "every second layer": (QWEN, {"mlp_only_layers": [], "decoder_sparse_step": 2}, [1]),
    "every second layer but one": (
        QWEN,
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4},
        [3],
    ),
    "every layer": (QWEN, {"mlp_only_layers": []}, [0, 1, 2]),
    "no layer": (QWEN, {"mlp_only_layers": [0, 1, 2]}, []),
    "biases in attention": (QWEN, {"attention_bias": True, "head_dim": 20}, [0, 2]),
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def test_logits_are_those_of_transformers(shape, tmp_path):
    variant, overrides, sparse_layers = shape
    oracle = transformers_model(variant, **overrides)
    oracle.save_pretrained(tmp_path)
    texts = [token_ids(length, seed) for seed, length in enumerate(LENGTHS)]

    model = get_model(tmp_path, torch.float64)
    steps = [[(1, 5), (0, 10)], [(0, 1), (2, 1)], [(0, 12)]]
    actual = torch.cat(PagedRequests(model, texts).run(steps))

    expected = torch.cat([reference_logits(oracle, text, torch.float64) for text in texts])
    assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max()
    kinds = [type(layer.mlp) for layer in model.model.layers]
    assert [i for i, kind in enumerate(kinds) if kind is SparseMoeBlock] == sparse_layers
    assert all(kind in (SparseMoeBlock, LlamaMLP) for kind in kinds)


@pytest.mark.parametrize("variant", ["phi3-fused", MIXTRAL, QWEN])
def test_the_engine_says_the_tokens_of_transformers(variant, tmp_path):
    oracle = transformers_model(variant).double()
    oracle.save_pretrained(tmp_path)
    all_in_float64(oracle)
    prompts = [token_ids(length, seed) for seed, length in enumerate([19, 4, 31, 1])]
    options = {**OPTIONS, "enable_lora": False, "max_num_batched_tokens": 7, "max_num_seqs": 3}

    engine = LLMEngine(EngineArgs(model=str(tmp_path), **options).create_engine_config(), None, warm_up=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(12))
    outputs = run(engine)

    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                ids.append(oracle(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert tokens_of(outputs[str(i)]) == ids[len(prompt) :]


@pytest.mark.parametrize("variant", [MIXTRAL, QWEN])
def test_dummy_weights_fill_routers_and_experts(variant, tmp_path):
    transformers_model(variant).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    models = [get_model(tmp_path, torch.float32, load_format="dummy", seed=seed) for seed in (3, 3, 4)]
    logits = [PagedRequests(model, [token_ids(9, 0)]).run([[(0, 9)]])[0] for model in models]

    experts = [module for module in models[0].modules() if isinstance(module, FusedMoE)]
    for parameter in (parameter for layer in experts for parameter in layer.parameters()):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert logits[0].isfinite().all()
