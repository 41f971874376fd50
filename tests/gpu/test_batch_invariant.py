"""`batch_invariant`: a request's logits have the same bits whatever else is in its batches.

On a CPU through Triton's interpreter, whose products are made to add up in one order (`rows_in_order`), as a GPU's do.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minivllm import SamplingParams
from minivllm.config import ModelConfig, check_one_order
from minivllm.gpu.invariant_backend import invariant_backend
from minivllm.gpu.kernels.invariant_linear import FASTEST, invariant_linear
from minivllm.gpu.paged_attention import query_tiles
from minivllm.gpu.pages.backend import PagedBackend
from minivllm.layers.linear import ColumnParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.slots import Slots
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.memory import Guarded, random
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.experts import MIXTRAL, sparse_world
from tests.worlds.gpu import graph_steps
from tests.worlds.models import token_ids

TILES = [tiles for _, _, tiles in FASTEST]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def rows_in_order(monkeypatch):
    """A BLAS takes a matrix's edge otherwise than its middle; a tensor core takes all rows alike."""

    def in_order(a, b, dtype):
        product = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            product += a[:, k : k + 1].astype(dtype) * b[k : k + 1].astype(dtype)
        return product

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", in_order)


# ---- linears ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_linear_is_that_of_float64(tiles, bias, dtype):
    x = Guarded(random(70, 150, seed=1, dtype=dtype), device=DEVICE)
    weight = random(75, 150, seed=2, dtype=dtype)
    bias = random(75, seed=3, dtype=dtype) if bias else None

    y = invariant_linear(x.view, weight.to(DEVICE), bias if bias is None else bias.to(DEVICE), tiles)

    expected = x.view.double().cpu() @ weight.double().T + (0 if bias is None else bias.double())
    assert (y.double().cpu() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    x.assert_intact()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_linear_has_the_same_bits_among_any_number_of_rows(dtype):
    x = random(600, 200, seed=4, dtype=dtype).to(DEVICE)
    weight = random(96, 200, seed=5, dtype=dtype).to(DEVICE)

    whole = invariant_linear(x, weight, tiles=TILES[0])

    for first, count in ((0, 1), (5, 2), (64, 60), (67, 65), (130, 400)):
        part = invariant_linear(x[first : first + count], weight, tiles=TILES[0])
        assert torch.equal(part, whole[first : first + count]), f"{count} rows"


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(700, 4096, 512), (513, 14336, 256), (64, 576, 1536)])
def test_every_tiling_of_a_linear_gives_the_same_bits(shape, dtype):
    m, k, n = shape
    x, weight = random(m, k, seed=6, dtype=dtype).to(DEVICE), random(n, k, seed=7, dtype=dtype).to(DEVICE)

    first, *others = [invariant_linear(x, weight, tiles=tiles) for tiles in TILES]
    alone = invariant_linear(x[5:6], weight)

    assert all(torch.equal(first, other) for other in (*others, invariant_linear(x, weight)))
    assert torch.equal(alone, first[5:6])
    if k == 14336:  # where a library changes its order with the number of rows: there is something to see
        assert not torch.equal(F.linear(x[5:6], weight), F.linear(x, weight)[5:6])


# ---- adapters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_backend, same", [(invariant_backend, True), (PagedBackend, False)])
def test_an_adapters_rows_have_the_same_bits_among_few_rows_and_many(make_backend, same):
    x = random(600, 1024, seed=8)
    adapters = [(0, 1, 2)[i % 3] for i in range(600)]

    few, many = (shrunk_and_expanded(make_backend, x[:rows], adapters[:rows]) for rows in (40, 600))

    assert torch.allclose(few, many[:40], rtol=1e-4, atol=1e-4) and few.abs().max() > 1
    assert torch.equal(few, many[:40]) is same


def shrunk_and_expanded(make_backend, x, adapters):
    """What two adapters of random weights add to zeros; 0 of `adapters` is a base row.   -> (rows, N)"""
    heights, rank = (40, 24), 8
    backend = make_backend(len(x), 1, DEVICE, 3, rank)
    empty = Slots.empty(3, rank, [(x.shape[1], height) for height in heights], torch.float32, DEVICE)
    slots = backend.place(empty, ColumnParallelLinear(x.shape[1], sum(heights)))
    for slot, r in ((0, 8), (2, 5)):
        parts = [
            LoRALayerWeights(
                "layer", r, r, random(r, x.shape[1], seed=20 + slot), random(height, r, seed=30 + height)
            )
            for height in heights
        ]
        slots.write(slot, parts)
    backend.begin_step(LoRAMapping(tuple(adapters), (0,)), [1, None, 2])
    y = torch.zeros(len(x), sum(heights), device=DEVICE)
    backend.add(y, x.to(DEVICE), slots, backend.token_rows(len(x)))
    return y.cpu()


# ---- the engine ---------------------------------------------------------------------------------------------


def invariant_engine(world, graphs=False, **options):
    options = {"max_loras": None, "batch_invariant": True, "max_num_seqs": 6, **options}
    engine = world.engine(**{"dtype": "float32", "device": DEVICE, **options})
    if graphs:
        graph_steps(engine.runner)
    return engine


def all_logits(engine):
    """Run until all requests have ended.   -> request id -> its rows of logits, in order; outputs"""
    rows, launch = defaultdict(list), engine.runner.launch_model

    def launched(output):
        step = launch(output)
        for request, row in zip(step.requests, step.logits if step.logits is not None else ()):
            rows[request.request_id].append(row.clone())
        return step

    engine.runner.launch_model = launched
    outputs = run(engine)
    return {request_id: torch.stack(found) for request_id, found in rows.items()}, outputs


def add(engine, world, requests):
    for request_id, name, prompt, answer in requests:
        engine.add_request(
            request_id, token_ids(prompt, prompt), greedy(answer), lora_request=world.request(name)
        )


OTHERS = [("long", "all", 17, 4), ("base", None, 5, 6), ("short", "patterns", 3, 2), ("mlp", "mlp", 9, 3)]


@pytest.mark.nightly_without_gpu
def test_a_request_has_the_same_bits_in_graphs_alone_and_in_company(world):
    """Without graphs: of all requests, below."""
    alone, company = (invariant_engine(world, True, max_num_batched_tokens=most) for most in (64, 7))
    request = [("watched", "qv", 13, 4)]

    add(alone, world, request)
    by_itself, _ = all_logits(alone)
    add(company, world, OTHERS[:2] + request + OTHERS[2:])
    among_others, outputs = all_logits(company)

    assert torch.equal(by_itself["watched"], among_others["watched"])
    for request_id, adapter, prompt, answer in OTHERS + request:
        expected = world.oracle().greedy(adapter, token_ids(prompt, prompt), answer)
        assert tokens_of(outputs[request_id]) == expected, request_id


@pytest.mark.nightly_without_gpu
@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_comes_first_and_whatever_a_step_takes_changes_no_bit_of_anybody(world, seed):
    requests = [*OTHERS, ("watched", "qv", 13, 4), ("same", "qv", 8, 3)]
    alone = {}
    for request in requests:
        engine = invariant_engine(world, max_num_batched_tokens=64)
        add(engine, world, [request])
        alone |= all_logits(engine)[0]
    order = np.random.default_rng(seed).permutation(len(requests))
    company = invariant_engine(world, max_num_batched_tokens=5 + 6 * seed, max_num_seqs=2 + 2 * seed)

    add(company, world, [requests[i] for i in order])
    together, _ = all_logits(company)

    assert together.keys() == alone.keys()
    for request_id, logits in together.items():
        assert torch.equal(logits, alone[request_id]), request_id


def test_a_found_prefix_changes_no_bit(world):
    engine = invariant_engine(world)
    request = ("watched", "qv", 9, 3)

    add(engine, world, [request])
    first, _ = all_logits(engine)
    add(engine, world, [request])
    second, outputs = all_logits(engine)

    assert outputs["watched"].num_cached_tokens == 8
    assert torch.equal(first["watched"], second["watched"])


@pytest.mark.nightly_without_gpu
def test_a_version_has_the_same_bits_beside_the_one_before_as_alone(world):
    """And its logprobs are those that PEFT computes in float64 of its weights, but for float32's roundings."""
    prompt, found = token_ids(13, 13), {}
    params = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True, logprobs=0)
    for company in (False, True):
        engine = invariant_engine(world, max_num_batched_tokens=9 if company else 64)
        engine.add_lora(world.request("qv"))
        if company:
            add(engine, world, [("before", "qv", 21, 9), *OTHERS[:2]])
            engine.step()
        engine.update_lora("qv", world.path("mlp"))
        engine.add_request("watched", prompt, params, lora_request=world.request("qv"))
        found[company] = run(engine)["watched"]

    assert found[True].lora_version == 1
    alone, beside = (logprobs_of(found[company]) for company in (False, True))
    assert torch.equal(alone, beside)
    text = prompt + tokens_of(found[True])
    logits = world.oracle(torch.float64).logits("mlp", [text])[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)[range(6), tokens_of(found[True])]
    assert (beside - expected).abs().max() < 2e-6


def logprobs_of(output):
    answer = output.outputs[0]
    return torch.tensor(
        [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs)], dtype=torch.float64
    )


@needs_cuda
def test_half_precision_in_graphs_has_the_same_bits_alone_and_in_company(world):
    logits = []
    for others in ([], OTHERS):
        engine = invariant_engine(world, graphs=True, dtype="bfloat16", max_num_batched_tokens=40)
        add(engine, world, [("watched", "qv", 23, 8), *others])
        logits.append(all_logits(engine)[0]["watched"])

    assert torch.equal(*logits)


# ---- what it does not go with -------------------------------------------------------------------------------


def test_experts_are_refused(tmp_path_factory):
    base = sparse_world(tmp_path_factory, MIXTRAL).base

    with pytest.raises(ValueError, match="batch_invariant does not know experts, but MixtralForCausalLM has"):
        ModelConfig(str(base), batch_invariant=True)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            lambda world: ModelConfig(str(world.base), batch_invariant=True, quantization="torchao"),
            "batch_invariant does not go with quantization 'torchao'",
        ),
        (lambda world: check_one_order("cpu", 1), "batch_invariant needs a GPU"),
        (lambda world: check_one_order("cuda", 2), "tensor_parallel_size 2"),
    ],
    ids=["int8", "a CPU", "two ranks"],
)
def test_what_cannot_keep_one_order_is_refused(world, monkeypatch, refused, said):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    with pytest.raises(ValueError, match=said):
        refused(world)


# ---- tiles of queries ---------------------------------------------------------------------------------------


def test_tiles_hold_every_query_once_in_order():
    lens, starts = np.array([1, 7, 16, 33]), np.array([9, 0, 4, 100])

    requests, rows, lengths, positions = query_tiles(lens, starts, tile_tokens=16)

    seen = [
        (int(request), int(row) + i, int(position) + i)
        for request, row, length, position in zip(requests, rows, lengths, positions)
        for i in range(length)
    ]
    first_rows = np.cumsum(lens) - lens
    assert seen == [(r, first_rows[r] + i, starts[r] + i) for r in range(4) for i in range(lens[r])]
    assert lengths.max() <= 16
