"""Adapters on experts on a GPU: near the exact result in every dtype, and nothing is read back to find who has what."""

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import FusedMoE
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.vllm.utils import from_layer
from tests.oracles.rows import assert_rows_equal
from tests.tools.device import DEVICE, needs_cuda, no_waiting
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.experts import MIXTRAL, QWEN, SparseWorld, sparse_world
from tests.worlds.models import token_ids

EXPERTS, TOP_K, SLOTS, RANK = 13, 3, 4, 16
TOKENS = [1, 33, 700]


def base_layer(hidden, inner, dtype):
    layer = FusedMoE(EXPERTS, TOP_K, hidden, inner, params_dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return layer


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


def wrap(base, backend, parts=("w1", "w3")):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, punica_backend=backend)
    layer = from_layer(base, SLOTS, config, list(parts))
    layer.set_mapping(make_backend(1024, 1024, DEVICE, config, LORA_EXTENSIONS))
    return layer


def batch(tokens, hidden, dtype):
    """Inputs, router logits and slots; nobody chooses the first and the last expert, and no two are liked alike."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=DEVICE)
    router_logits = torch.randn(tokens, EXPERTS, generator=generator, device=DEVICE)
    router_logits[:, [0, 12]] = -50.0
    slots = torch.randint(-1, SLOTS, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    slots[0] = 1
    return x.to(dtype), router_logits, slots


def use_slots(layer, slots):
    ids = tuple(slot + 1 for slot in slots)
    layer.backend.begin_step(LoRAMapping(ids, ids), [s + 1 for s in range(SLOTS)])
    layer.backend.sync_slots()


def merged(base, adapter):
    """In float64 on the CPU, one adapter in the weights."""
    inner = base.intermediate_size
    layer = FusedMoE(EXPERTS, TOP_K, base.hidden_size, inner, params_dtype=torch.float64)
    layer.w13_weight.data.copy_(base.w13_weight)
    layer.w2_weight.data.copy_(base.w2_weight)
    rows = [layer.w13_weight[:, :inner], layer.w2_weight, layer.w13_weight[:, inner:]]
    for weight, a, b in zip(rows, *adapter) if adapter else ():
        if a is not None:
            weight.data += b.double().cpu() @ a.double().cpu()
    return layer


def exact(base, of_slots, slots, x, router_logits):
    x, router_logits = x.double().cpu(), router_logits.double().cpu()
    layers = [merged(base, adapter) for adapter in (*of_slots, None)]  # the last for base rows and slot 3
    outputs = [layer(x, router_logits) for layer in layers]
    return torch.stack([outputs[slot if 0 <= slot < 3 else 3][token] for token, slot in enumerate(slots)])


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (128, 256), (36, 20)])
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_a_mixed_batch_is_near_the_exact_result(backend, hidden, inner, tokens, dtype, error):
    base = base_layer(hidden, inner, dtype)
    layer, of_slots = wrap(base, backend), adapters(hidden, inner, dtype)
    for slot, adapter in enumerate(of_slots):
        layer.set_lora(slot, *adapter)
    x, router_logits, slots = batch(tokens, hidden, dtype)
    use_slots(layer, slots)

    actual = layer(x, router_logits)

    expected = exact(base, of_slots, slots, x, router_logits)
    assert actual.dtype == dtype
    assert (actual.cpu() - expected).norm() < error * expected.norm()
    assert_rows_equal(actual, expected, labels=[f"slot {slot}" for slot in slots], tolerance=5 * error)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_base_rows_are_those_of_the_base_layer_to_the_bit(dtype):
    base = base_layer(64, 24, dtype)
    layer = wrap(base, "triton")
    for slot, adapter in enumerate(adapters(64, 24, dtype)):
        layer.set_lora(slot, *adapter)
    x, router_logits, slots = batch(700, 64, dtype)
    use_slots(layer, slots)
    rows = [token for token, slot in enumerate(slots) if slot in (-1, 3)]

    actual = layer(x, router_logits)

    assert_rows_equal(actual[rows], base(x, router_logits)[rows])


@needs_cuda
def test_bfloat16_does_not_wait_for_the_gpu():
    layer = wrap(base_layer(64, 24, torch.bfloat16), "triton")
    for slot, adapter in enumerate(adapters(64, 24, torch.bfloat16)):
        layer.set_lora(slot, *adapter)
    x, router_logits, slots = batch(33, 64, torch.bfloat16)
    use_slots(layer, slots)
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
