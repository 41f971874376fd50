"""q, k and v leave what adapters add to the attention that rotates them and writes the KV cache."""

import numpy as np
import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.gpu.fused import blocks
from minivllm.gpu.fused.blocks import attend, linear_deferred
from minivllm.gpu.kernels import paged_tuning
from minivllm.gpu.kernels.adapted_rotary_op import adapted_rotary
from minivllm.gpu.paged_attention import PagedAttentionMetadata
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.linear import QKVParallelLinear
from minivllm.layers.ranks import ONE_RANK
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.lora.wrapping import from_layer
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.oracles.rotary import rotated
from tests.tools.device import DEVICE, compile_for_gpu
from tests.worlds.engines import run, tiny_world
from tests.worlds.gpu import MIXED, add_requests, assert_tokens_are_right, graphed_engine

WIDTH, HEADS, KV_HEADS, SIZE, SLOTS, BLOCK, SCALE = 48, 6, 2, 20, 3, 4, 0.2
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.float64: 1e-12}
MIXTURES = {
    "one": [0],
    "mixed": [2, -1, 0, 0, 2, -1, 1],
    "half": [-1, 0] * 9,
    "other": [2] * 5,
    "base": [-1] * 4,
}
KINDS = ["plain", "paged", "tiled"]
# Attention of each kind on a mixed batch; the other mixtures are the linear's matter.
ATTENDED = [("mixed", kind) for kind in KINDS] + [(name, "paged") for name in MIXTURES if name != "mixed"]


class QKV:
    """q, k and v with adapters of unlike ranks in slots 0 and 2, and the attention behind them.

    parts   1 = one adapter for q, k and v
    """

    def __init__(self, dtype=torch.float32, rank=8, parts=3, tp=ONE_RANK, room=64, backend="paged"):
        config = LoRAConfig(rank, SLOTS, lora_dtype=dtype, punica_backend=backend)
        self.dtype, self.tp = dtype, tp
        self.punica = make_backend(room, room, DEVICE, config, LORA_EXTENSIONS)
        self.base = QKVParallelLinear(WIDTH, SIZE, HEADS, KV_HEADS, True, dtype, DEVICE, "qkv", tp)
        pick = torch.Generator().manual_seed(0)
        heights = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        whole = torch.randn(sum(heights), WIDTH, generator=pick).to(dtype)
        bias = torch.randn(sum(heights), generator=pick).to(dtype)
        rows = [
            slice(first + own.start, first + own.stop) for first, own in zip((0, 120, 160), self.base.rows)
        ]
        self.rows = torch.cat([torch.arange(sum(heights))[own] for own in rows])
        self.base.weight.data.copy_(whole[self.rows])
        self.base.bias.data.copy_(bias[self.rows])
        self.layer = from_layer(self.base, SLOTS, config, ["q", "k", "v"][:parts])
        self.layer.set_mapping(self.punica)
        self.heads, self.kv_heads = self.base.num_heads, self.base.num_kv_heads
        self.attention = Attention(self.heads, SIZE, SCALE, self.kv_heads)
        self.whole, self.whole_bias, self.heights = whole, bias, heights if parts == 3 else [sum(heights)]
        self.weights = {}
        for slot, ranks in {0: (rank, 3, 1), 2: (5, 0, rank)}.items():
            ranks = ranks[:parts]
            a = [torch.randn(r, WIDTH, generator=pick).to(dtype) if r else None for r in ranks]
            b = [
                torch.randn(height, r, generator=pick).to(dtype) if r else None
                for height, r in zip(self.heights, ranks)
            ]
            self.layer.write(slot, self.layer.pack(self.layer.share.of(parts_of(a, b))))
            self.weights[slot] = a, b

    def step(self, slots):
        ids = [slot + 1 for slot in slots]
        self.punica.begin_step(LoRAMapping(ids, ids, is_prefill=True), list(range(1, SLOTS + 1)))

    def product(self, x, slots):
        """(T, Hq + 2 Hkv, D) of the process, adapters included, not rotated"""
        y = x.double() @ self.whole.double().T + self.whole_bias.double()
        for row, slot in enumerate(slots):
            offset = 0
            for height, a, b in zip(self.heights, *self.weights.get(slot, ([], []))):
                if a is not None:
                    y[row, offset : offset + height] += b.double() @ (a.double() @ x[row].double())
                offset += height
        return y[:, self.rows].unflatten(1, (-1, SIZE))

    def assert_answers(self, slots, kind="paged", more=0.0, seed=0):
        """`more`: what else is added to the product. One request has two tokens in the cache, which are zeros."""
        tokens = len(slots)
        x = rows(tokens, self.dtype, seed)
        lengths = [1] if tokens == 1 else [1, tokens - 1]
        contexts = [length + 2 * (i == 0) for i, length in enumerate(lengths)]
        blocks = np.random.default_rng(tokens).permutation(60 + tokens) + 1
        tables = [[int(block) for block in blocks[10 * i :][: 10 + i * tokens]] for i in range(len(lengths))]
        cache = torch.full((62 + tokens, BLOCK, 2 * self.kv_heads, SIZE), float("nan"), dtype=self.dtype)
        cache[tables[0][0], :2] = 0
        self.attention.bind_kv_cache(cache.to(DEVICE))
        attn = metadata(kind, lengths, contexts, tables, self.dtype)
        angle = torch.rand(tokens, 1, SIZE // 2, generator=torch.Generator().manual_seed(tokens)).double() * 6
        exact = rotated(self.product(x, slots) + more, angle, self.heads + self.kv_heads)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
        of_angles = torch.promote_types(self.dtype, torch.float32)

        with torch.inference_mode():
            y, self.left = linear_deferred(self.layer, x.to(DEVICE))
            rotary = [part.to(DEVICE, of_angles) for part in (cos, sin)]
            found = attend(self.attention, y.unflatten(1, (-1, SIZE)), rotary, attn, self.left).cpu()

        assert_close(found, attended(exact, lengths, self.heads, self.kv_heads))
        kept = self.attention.kv_cache.cpu().flatten(0, 1)
        mapping = attn.slot_mapping.cpu()
        assert_close(kept[mapping], exact[:, self.heads :])
        others = torch.ones(len(kept), dtype=torch.bool)
        others[mapping] = False
        assert torch.equal(kept[others].nan_to_num(7), cache.flatten(0, 1)[others].nan_to_num(7))
        return found


def parts_of(a, b):
    return [
        None if one is None else LoRALayerWeights("qkv", len(one), len(one), one.to(DEVICE), other.to(DEVICE))
        for one, other in zip(a, b)
    ]


def metadata(kind, lengths, contexts, tables, dtype):
    rest = lengths, contexts, tables, BLOCK
    if kind == "plain":
        return AttentionMetadata.build(*rest, DEVICE, dtype)
    return PagedAttentionMetadata.build(*rest, 16, DEVICE, splits_decodes=kind == "paged")


def attended(heads, lengths, num_heads, kv_heads):
    """(T, Hq * D) by the definition, after two tokens of zeros in the first request's context."""
    outputs = []
    for i, request in enumerate(heads.split(lengths)):
        past = request.new_zeros(2 * (i == 0), kv_heads, SIZE)
        q, k, v = request.split([num_heads, kv_heads, kv_heads], dim=1)
        k, v = (torch.cat((past, part)).repeat_interleave(num_heads // kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("nhd,lhd->hnl", q, k) * SCALE
        later = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hnl,lhd->nhd", weights, v).flatten(1))
    return torch.cat(outputs)


def assert_close(found, exact):
    assert (found.double() - exact).abs().max() <= CLOSE[found.dtype] * exact.abs().max()


def rows(count, dtype=torch.float32, seed=0):
    pick = torch.Generator().manual_seed(100 * seed + count)
    return (torch.randn(count, WIDTH, generator=pick) / 8).to(dtype)


@pytest.mark.parametrize(("mixture", "kind"), ATTENDED)
def test_attention_sees_every_rows_adapters_share(kind, mixture):
    qkv = QKV()
    qkv.step(MIXTURES[mixture])

    qkv.assert_answers(MIXTURES[mixture], kind)

    assert (qkv.left is not None) == (mixture != "base")


@pytest.mark.parametrize(
    ("dtype", "rank", "parts"),
    [(torch.float16, 20, 3), (torch.float32, 72, 3), (torch.float64, 8, 3), (torch.float32, 8, 1)],
    ids=["float16", "many ranks", "float64", "one adapter for q, k and v"],
)
def test_whatever_dtype_and_rank_and_parts(dtype, rank, parts):
    if DEVICE == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is what a CPU's tests compute in")
    qkv = QKV(dtype, rank, parts)
    qkv.step(MIXTURES["mixed"])

    qkv.assert_answers(MIXTURES["mixed"], "plain" if dtype == torch.float64 else "paged")

    assert qkv.left is not None


def test_a_program_turns_several_rows_and_heads_in_a_long_step(monkeypatch):
    """A step is long from 513 tokens on, which `test_prompts_of_many_rows_a_tile` has at night; here from 4 on."""
    monkeypatch.setattr(paged_tuning, "FEW_TOKENS", 3)
    qkv = QKV()
    qkv.step(MIXTURES["mixed"])

    qkv.assert_answers(MIXTURES["mixed"], "tiled")

    assert qkv.left is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly_without_gpu
def test_prompts_of_many_rows_a_tile(kind):
    slots = [0, -1, 2, 2, 0, 1, 0] * 74
    qkv = QKV(room=600)
    qkv.step(slots)

    qkv.assert_answers(slots, kind)

    assert qkv.left is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_several_processes_does_so_with_its_heads(rank):
    qkv, slots = QKV(tp=TensorParallel(rank, 2)), MIXTURES["mixed"]
    qkv.step(slots)

    qkv.assert_answers(slots)

    assert (qkv.heads, qkv.kv_heads) == (HEADS // 2, KV_HEADS // 2)
    assert qkv.left is not None


def test_what_a_hook_adds_to_the_product_is_there_too():
    qkv, slots = QKV(), [0, 2, -1, 0, 1, 2]
    qkv.layer.register_forward_hook(lambda layer, inputs, output: (output[0] + 0.5, None))

    qkv.step(slots)

    qkv.assert_answers(slots, more=0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [[-1] * 4, [2, -1, 0, 0]], ids=["base", "adapters"])
def test_a_step_finds_nothing_of_one_that_ended_before_its_attention(slots, kind):
    qkv = QKV()
    qkv.step([0, 2, 0, -1])
    with torch.inference_mode():
        _, left = linear_deferred(qkv.layer, rows(4).to(DEVICE))
    assert left is not None

    qkv.step(slots)

    qkv.assert_answers(slots, kind, seed=1)


def test_rows_that_are_to_have_the_same_bits_in_every_batch_leave_it_nothing():
    qkv, slots = QKV(backend="invariant"), MIXTURES["mixed"]
    qkv.step(slots)

    qkv.assert_answers(slots, "tiled")

    assert qkv.left is None


def watched(monkeypatch):
    """Numbers of rows that the kernel was launched on."""
    launched = []

    def watch(update, heads, *rest, **options):
        launched.append(len(heads))
        adapted_rotary(update, heads, *rest, **options)

    monkeypatch.setattr(blocks, "adapted_rotary", watch)
    return launched


@pytest.mark.nightly_without_gpu
def test_an_engine_answers_where_attention_adds_what_adapters_add(tmp_path_factory, monkeypatch):
    launched = watched(monkeypatch)
    world = tiny_world(tmp_path_factory)
    engine = graphed_engine(world, "decodes", "mixed", punica_backend="paged", max_num_batched_tokens=20)
    names = ["qv", None, "all"]

    add_requests(engine, world, names)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names)
    assert len(launched) > 10


@pytest.mark.nightly_without_gpu
def test_an_engine_whose_attention_is_pytorchs_does_so_too(tmp_path_factory, monkeypatch):
    launched, world = watched(monkeypatch), tiny_world(tmp_path_factory)
    engine = world.engine(punica_backend="paged", max_loras=4, dtype="float32", device=DEVICE)

    add_requests(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert len(launched) > 10


def test_norms_of_q_and_k_read_whole_products(tmp_path_factory, monkeypatch):
    launched, world = watched(monkeypatch), tiny_world(tmp_path_factory, "qwen3-wide-heads")
    engine = world.engine(punica_backend="paged", max_loras=4, dtype="float32", device=DEVICE)
    names = ["all", None]

    add_requests(engine, world, names, max_tokens=2)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=2)
    assert not launched


@pytest.mark.nightly
def test_the_kernel_compiles_for_a_gpu_once_for_short_steps_and_once_for_long_ones(tmp_path):
    done = compile_for_gpu("rotary", cache=tmp_path)

    assert done.stdout == "compiled\n", done.stderr
