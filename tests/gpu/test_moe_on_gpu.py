"""Experts on a GPU, with adapters and without: near the exact result in every dtype and the same in every order.

In bfloat16 nothing is read back to find who has chosen what, and who has which adapter.
"""

import pytest
import torch

from minivllm import EngineArgs, LLMEngine
from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import FusedMoE, product_by_expert
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.vllm.utils import from_layer
from minivllm.worker.model_runner import NO_GRAPHS, ModelRunner
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE, needs_cuda, no_waiting
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.experts import MIXTRAL, QWEN, SparseWorld, sparse_world
from tests.worlds.models import token_ids, transformers_model

EXPERTS, TOP_K, SLOTS, RANK = 13, 3, 4, 16
SIZES = [(64, 24), (128, 256), (36, 20)]  # of the model, of an expert


def base_layer(hidden, inner, dtype, top_k=TOP_K):
    layer = FusedMoE(EXPERTS, top_k, hidden, inner, params_dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def batch(tokens, hidden, dtype):
    """Inputs and router logits, no two of a token equal; nobody chooses three of the experts, the last among them."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=DEVICE)
    order = torch.rand(tokens, EXPERTS, generator=generator, device=DEVICE).argsort(dim=-1)
    router_logits = order * 0.25
    router_logits[:, [0, 6, 12]] = -50.0
    return x.to(dtype), router_logits.to(dtype)


def merged(base, adapter=None):
    """In float64 on the CPU, where each expert is a product of its own; an adapter may be in the weights."""
    inner = base.intermediate_size
    layer = FusedMoE(EXPERTS, base.top_k, base.hidden_size, inner, params_dtype=torch.float64)
    layer.w13_weight.data.copy_(base.w13_weight)
    layer.w2_weight.data.copy_(base.w2_weight)
    rows = [layer.w13_weight[:, :inner], layer.w2_weight, layer.w13_weight[:, inner:]]
    for weight, a, b in zip(rows, *adapter) if adapter else ():
        if a is not None:
            weight.data += b.double().cpu() @ a.double().cpu()
    return layer


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 2, 33, 700])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_a_gpu_answers_as_the_cpu(hidden, inner, tokens, dtype, error):
    layer = base_layer(hidden, inner, dtype)
    x, router_logits = batch(tokens, hidden, dtype)

    actual = layer(x, router_logits)

    expected = merged(layer)(x.double().cpu(), router_logits.double().cpu())
    assert actual.dtype == dtype
    assert (actual.cpu() - expected).norm() < error * expected.norm()


@needs_cuda
@pytest.mark.parametrize("tokens", [1, 33])
def test_rows_of_a_batch_are_rounded_alike_whatever_their_order(tokens):
    layer = base_layer(64, 24, torch.float32, top_k=5)
    _, router_logits = batch(tokens, 64, torch.float32)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    pairs, mixed = layer.route(router_logits), layer.route(router_logits[order])
    y = torch.randn(5 * tokens, 64, device=DEVICE)
    y_mixed = torch.empty_like(y)
    y_mixed[mixed.places] = y[pairs.places].view(tokens, 5, 64)[order].flatten(0, 1)

    assert torch.equal(layer.combine(y_mixed, mixed), layer.combine(y, pairs)[order])


@needs_cuda
def test_other_dtypes_read_the_counts_alone():
    layer = base_layer(64, 24, torch.float16)
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


# ---- adapters -----------------------------------------------------------------------------------------------


def adapters(hidden, inner, dtype):
    """[w1, w2, w3] of A and of B for each slot but the last, which holds nothing of the experts."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    found = []
    for ranks in ((16, 16, 16), (4, 9, 1), (0, 3, 8)):
        shapes = zip(ranks, ((hidden, inner), (inner, hidden), (hidden, inner)))
        pairs = [
            [
                torch.randn(EXPERTS, *shape, generator=generator, device=DEVICE) * 0.2
                for shape in ((r, k), (n, r))
            ]
            for r, (k, n) in shapes
        ]
        found.append(
            [[pair[side].to(dtype) if r else None for pair, r in zip(pairs, ranks)] for side in (0, 1)]
        )
    return found


def wrap(base, backend, of_slots):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, punica_backend=backend)
    layer = from_layer(base, SLOTS, config, ["w1", "w3"])
    layer.set_mapping(make_backend(1024, 1024, DEVICE, config, LORA_EXTENSIONS))
    for slot, adapter in enumerate(of_slots):
        layer.set_lora(slot, *adapter)
    return layer


def use_slots(layer, tokens):
    """Begin a step.   -> the slot of each row, the second one's among them"""
    slots = torch.randint(-1, SLOTS, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    slots[0] = 1
    ids = tuple(slot + 1 for slot in slots)
    layer.backend.begin_step(LoRAMapping(ids, ids), [s + 1 for s in range(SLOTS)])
    layer.backend.sync_slots()
    return slots


def exact(base, of_slots, slots, x, router_logits):
    x, router_logits = x.double().cpu(), router_logits.double().cpu()
    layers = [merged(base, adapter) for adapter in (*of_slots, None)]  # the last for base rows and slot 3
    outputs = [layer(x, router_logits) for layer in layers]
    return torch.stack([outputs[slot if 0 <= slot < 3 else 3][token] for token, slot in enumerate(slots)])


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_a_mixed_batch_is_near_the_exact_result(backend, hidden, inner, tokens, dtype, error):
    base = base_layer(hidden, inner, dtype)
    of_slots = adapters(hidden, inner, dtype)
    layer = wrap(base, backend, of_slots)
    x, router_logits = batch(tokens, hidden, dtype)
    slots = use_slots(layer, tokens)

    actual = layer(x, router_logits)

    expected = exact(base, of_slots, slots, x, router_logits)
    assert actual.dtype == dtype
    assert (actual.cpu() - expected).norm() < error * expected.norm()
    assert_rows_equal(actual, expected, labels=[f"slot {slot}" for slot in slots], tolerance=5 * error)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_base_rows_are_those_of_the_base_layer_to_the_bit(dtype):
    base = base_layer(64, 24, dtype)
    layer = wrap(base, "triton", adapters(64, 24, dtype))
    x, router_logits = batch(700, 64, dtype)
    slots = use_slots(layer, 700)
    rows = [token for token, slot in enumerate(slots) if slot in (-1, 3)]

    actual = layer(x, router_logits)

    assert_rows_equal(actual[rows], base(x, router_logits)[rows])


@needs_cuda
@pytest.mark.parametrize("has_adapters", [False, True])
def test_bfloat16_does_not_wait_for_the_gpu(has_adapters):
    layer = base_layer(64, 24, torch.bfloat16)
    if has_adapters:
        layer = wrap(layer, "triton", adapters(64, 24, torch.bfloat16))
        use_slots(layer, 33)
    x, router_logits = batch(33, 64, torch.bfloat16)
    layer(x, router_logits)  # compiles

    with no_waiting():
        answers = layer(x, router_logits)

    assert answers.shape == (33, 64)


@needs_cuda
@pytest.mark.parametrize("backend", ["triton", "paged"])
@pytest.mark.parametrize("variant", [MIXTRAL, QWEN])
def test_an_engine_says_the_tokens_of_transformers(tmp_path_factory, variant, backend):
    world = sparse_world(tmp_path_factory, variant)
    engine = world.engine(dtype="float32", device=DEVICE, punica_backend=backend, max_cpu_loras=4)
    pairs = [(name, token_ids(5 + i, i)) for i, name in enumerate((None, *world.names))]

    for number, (name, prompt) in enumerate(pairs):
        engine.add_request(str(number), prompt, greedy(8), lora_request=world.request(name))
    outputs = run(engine)

    for number, (name, prompt) in enumerate(pairs):
        assert tokens_of(outputs[str(number)]) == world.answer(name, prompt, 8), name


@needs_cuda
@pytest.mark.parametrize("variant", [MIXTRAL, QWEN])
def test_an_engine_in_bfloat16_serves_adapters_that_change_slots(tmp_path, variant):
    world = SparseWorld(tmp_path, variant, hidden_size=64)  # heads that flash attention takes
    engine = world.engine(dtype="bfloat16", device=DEVICE, block_size=16, max_cpu_loras=4)
    engine.runner.warm_up()

    for number, name in enumerate((None, *world.names)):
        engine.add_request(str(number), token_ids(9, 0), greedy(8), lora_request=world.request(name))
    outputs = run(engine)

    found = [tokens_of(outputs[str(number)]) for number in range(len(world.names) + 1)]
    assert all(len(tokens) == 8 for tokens in found)
    assert sum(tokens != found[0] for tokens in found[1:]) > len(world.names) / 2
