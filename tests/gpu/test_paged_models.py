"""Whole models on the GPU's kernels give the logits of transformers, however their tokens are cut up and batched."""

import pytest
import torch

from minivllm.gpu.fused import fuse
from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.nights import by_day
from tests.worlds.models import VARIANTS, PagedRequests, every_expert, token_ids, transformers_model

LENGTHS = [40, 7, 21]
STEPS = {
    "prompts, then decodes": [[(0, 38), (1, 5), (2, 19)], *[[(2, 1), (0, 1), (1, 1)]] * 2],
    "chunks among decodes": [
        [(0, 11)],
        [(1, 3), (0, 1)],
        [(0, 20), (1, 1), (2, 9)],
        [(1, 1), (2, 12), (0, 1)],
        [(0, 7), (1, 2)],
    ],
}


# Those whose blocks are fused in another way: heads with norms, experts, biases, linears that are stored as one.
DIFFERENT = {"qwen3-wide-heads", "mixtral", "llama-linear-rope-biases-tied", "phi3-fused"}
AT_NIGHT = pytest.mark.nightly_without_gpu


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in DIFFERENT else AT_NIGHT) for name in VARIANTS],
)
def variant(request):
    return request.param


def save(folder, variant, **overrides):
    """A tiny model whose head size flash attention takes: a multiple of eight."""
    sizes = {"head_dim": 24} if variant == "qwen3-wide-heads" else {"hidden_size": 64}
    transformers_model(variant, **sizes, **overrides).save_pretrained(folder)
    return folder


def logits_of_transformers(folder, texts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return torch.cat([reference_logits(model, text, torch.float64) for text in texts])


@pytest.fixture(scope="module")
def folder(variant, tmp_path_factory):
    return save(tmp_path_factory.mktemp(variant), variant)


@pytest.fixture(scope="module")
def folder_for_half(variant, tmp_path_factory):
    return save(tmp_path_factory.mktemp(variant), variant, **every_expert(variant))


@pytest.fixture(scope="module")
def texts():
    return [token_ids(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(folder, texts):
    return logits_of_transformers(folder, texts)


@pytest.fixture(scope="module")
def expected_for_half(folder_for_half, texts):
    return logits_of_transformers(folder_for_half, texts)


def error_of(model, texts, steps, expected, paged=True):
    """How far our logits are from the expected ones, relative to their norm."""
    logits = torch.cat(PagedRequests(model, texts, paged=paged).run(steps))
    return ((logits.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("steps", by_day(STEPS, 2, AT_NIGHT))
def test_a_float32_model_equals_transformers(folder, texts, expected, steps):
    model = fuse(get_model(folder, torch.float32, DEVICE))

    assert error_of(model, texts, STEPS[steps], expected) < 2e-6


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("half", "error"),
    [
        pytest.param(torch.float16, 0.003, marks=AT_NIGHT),
        pytest.param(torch.bfloat16, 0.025, marks=needs_cuda),
    ],
    ids=str,
)
def test_half_precision_follows_transformers_in_full(
    folder_for_half, texts, expected_for_half, steps, half, error
):
    model = fuse(get_model(folder_for_half, half, DEVICE))

    assert error_of(model, texts, STEPS[steps], expected_for_half) < error


@needs_cuda
@pytest.mark.parametrize("steps", STEPS)
def test_without_the_fast_path_a_gpu_computes_the_same(folder, texts, expected, steps):
    model = get_model(folder, torch.float32, DEVICE)

    assert error_of(model, texts, STEPS[steps], expected, paged=False) < 2e-6
