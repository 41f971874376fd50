"""Experts on a GPU: the same answers as one by one, and in bfloat16 without waiting for the GPU to know the counts."""

import pytest
import torch

from minivllm import EngineArgs, LLMEngine
from minivllm.layers.fused_moe import FusedMoE, product_by_expert
from minivllm.worker.model_runner import NO_GRAPHS, ModelRunner
from tests.tools.device import DEVICE, needs_cuda, no_waiting
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.models import token_ids, transformers_model

NUM_EXPERTS = 13


def experts(hidden, inner, dtype, top_k=3):
    layer = FusedMoE(NUM_EXPERTS, top_k, hidden, inner, params_dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def batch(tokens, hidden, dtype):
    """Inputs and router logits, no two of a token equal; nobody chooses three of the experts, the last among them."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=DEVICE)
    order = torch.rand(tokens, NUM_EXPERTS, generator=generator, device=DEVICE).argsort(dim=-1)
    router_logits = order * 0.25
    router_logits[:, [0, 6, 12]] = -50.0
    return x.to(dtype), router_logits.to(dtype)


def in_float64_on_the_cpu(layer, x, router_logits):
    """The same layer where each expert is a product of its own."""
    copy = FusedMoE(
        NUM_EXPERTS, layer.top_k, layer.hidden_size, layer.intermediate_size, params_dtype=torch.float64
    )
    for ours, theirs in zip(copy.parameters(), layer.parameters(), strict=True):
        ours.data.copy_(theirs)
    return copy(x.cpu().double(), router_logits.cpu().double())


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 2, 33, 700])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (128, 256), (36, 20)])
def test_a_gpu_answers_as_the_cpu(hidden, inner, tokens, dtype, error):
    layer = experts(hidden, inner, dtype)
    x, router_logits = batch(tokens, hidden, dtype)

    actual = layer(x, router_logits)

    expected = in_float64_on_the_cpu(layer, x, router_logits)
    assert actual.dtype == dtype
    assert (actual.cpu() - expected).norm() < error * expected.norm()


@needs_cuda
@pytest.mark.parametrize("tokens", [1, 33])
def test_rows_of_a_batch_are_rounded_alike_whatever_their_order(tokens):
    layer = experts(64, 24, torch.float32, top_k=5)
    _, router_logits = batch(tokens, 64, torch.float32)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    pairs, mixed = layer.route(router_logits), layer.route(router_logits[order])
    y = torch.randn(5 * tokens, 64, device=DEVICE)
    y_mixed = torch.empty_like(y)
    y_mixed[mixed.places] = y[pairs.places].view(tokens, 5, 64)[order].flatten(0, 1)

    assert torch.equal(layer.combine(y_mixed, mixed), layer.combine(y, pairs)[order])


@needs_cuda
def test_bfloat16_does_not_wait_for_the_gpu():
    layer = experts(64, 24, torch.bfloat16)
    x, router_logits = batch(33, 64, torch.bfloat16)

    with no_waiting():
        answers = layer(x, router_logits)

    assert answers.shape == (33, 64)


@needs_cuda
def test_other_dtypes_read_the_counts_alone():
    layer = experts(64, 24, torch.float16)
    x, router_logits = batch(33, 64, torch.float16)

    with no_waiting():
        pairs = layer.route(router_logits)

    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        product_by_expert(x, layer.w13_weight, pairs)


def engine_of(folder, variant, **options):
    """An engine without LoRA on one of worlds.models.VARIANTS, whose heads flash attention takes."""
    transformers_model(variant, hidden_size=64).save_pretrained(folder)
    options = {**OPTIONS, "enable_lora": False, "device": DEVICE, "block_size": 16, **options}
    return LLMEngine(EngineArgs(model=str(folder), **options).create_engine_config(), None, warm_up=False)


@pytest.mark.parametrize(("variant", "captured"), [("mistral-one-kv-head", 1), ("mixtral", 0)])
def test_steps_of_a_sparse_model_are_not_captured(tmp_path, variant, captured):
    captures = []
    plain = engine_of(tmp_path, variant, dtype="float32").runner
    runner = ModelRunner(plain.config, capture=lambda runner: captures.append(runner) or NO_GRAPHS)

    runner.warm_up()

    assert captures == [runner] * captured


@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["phi3-fused", "mixtral", "qwen3-moe-a-dense-layer"])
def test_an_engine_that_has_warmed_up_answers_in_half_precision(tmp_path, variant, dtype):
    engine = engine_of(tmp_path, variant, dtype=dtype)
    prompts = [token_ids(length, seed) for seed, length in enumerate([19, 4, 31])]

    engine.runner.warm_up()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(12))
    outputs = run(engine)

    assert (engine.runner.graphs is NO_GRAPHS) == (variant != "phi3-fused")
    assert [len(tokens_of(outputs[str(i)])) for i in range(3)] == [12] * 3
