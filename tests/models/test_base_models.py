"""Each kind of base model gives the logits of transformers, however its tokens are cut up and batched."""

import numpy as np
import pytest
import torch

from minivllm.layers.linear import LinearBase
from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.worlds.models import VARIANTS, PagedRequests, every_expert, token_ids, transformers_model

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
LENGTHS = [61, 9, 34, 1, 47]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module", params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def folder(variant, tmp_path_factory):
    folder = tmp_path_factory.mktemp(variant)
    transformers_model(variant).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts():
    return [token_ids(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(folder, dtype, texts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [reference_logits(model, text, dtype) for text in texts]


@pytest.fixture(scope="module")
def model(folder, dtype):
    return get_model(folder, dtype)


def assert_same_logits(actual, expected):
    largest = max(logits.abs().max() for logits in expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= TOLERANCES[theirs.dtype] * largest


def random_steps(lengths, seed):
    """Steps that run texts in random subsets, orders and chunk sizes, about half of the rows decodes."""
    rng = np.random.default_rng(seed)
    left, steps = list(lengths), []
    while any(left):
        rows = [row for row in rng.permutation(len(left)).tolist() if left[row] and rng.random() < 0.7]
        work = [(row, min(left[row], 1 if rng.random() < 0.5 else int(rng.integers(2, 20)))) for row in rows]
        for row, n in work:
            left[row] -= n
        if work:
            steps.append(work)
    return steps


def test_whole_prompts_in_one_batch(model, texts, expected):
    requests = PagedRequests(model, texts)

    actual = requests.run([list(enumerate(LENGTHS))])

    assert_same_logits(actual, expected)


@pytest.mark.parametrize("seed", range(2))
def test_decodes_and_chunks_mixed_in_any_order(model, texts, expected, seed):
    requests = PagedRequests(model, texts, seed=seed)

    actual = requests.run(random_steps(LENGTHS, seed))

    assert_same_logits(actual, expected)


@pytest.mark.parametrize(("half", "error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str)
def test_half_precision_follows_transformers_in_full(variant, tmp_path, texts, half, error):
    oracle = transformers_model(variant, **every_expert(variant))
    oracle.save_pretrained(tmp_path)
    expected = reference_logits(oracle, texts[0], torch.float32)
    requests = PagedRequests(get_model(tmp_path, half), texts[:2])

    actual = requests.run([[(0, 40)], [(0, 20), (1, 9)], [(0, 1)]])[0]

    assert actual.dtype == half
    assert (actual.float() - expected).norm() < error * expected.norm()


@pytest.fixture
def one_model(tmp_path):
    transformers_model("qwen2-tied").save_pretrained(tmp_path)
    return get_model(tmp_path, torch.float32)


class Doubled(torch.nn.Module):
    """Stands in for a wrapper: calls the module it replaces, and doubles what comes out."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        output = self.base(*args)
        return (output[0] * 2, output[1]) if isinstance(output, tuple) else output * 2


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "lm_head",
        "logits_processor",
    ],
)
def test_a_module_put_in_anothers_place_is_the_one_called(one_model, texts, name):
    before = PagedRequests(one_model, texts[:1]).run([[(0, 10)]])[0]
    wrapper = Doubled(one_model.get_submodule(name))

    one_model.set_submodule(name, wrapper)
    after = PagedRequests(one_model, texts[:1]).run([[(0, 10)]])[0]

    assert wrapper.calls == 1
    assert not torch.allclose(before, after)


def test_every_linear_of_a_float32_model_is_packed_once(one_model):
    linears = [module for module in one_model.modules() if isinstance(module, LinearBase)]

    assert len(linears) == 2 * 4 + 1
    assert all((linear.packed_weight is None) == (linear.weight.numel() > 0) for linear in linears)
    assert one_model.model.embed_tokens.weight.shape == (97, 48)
