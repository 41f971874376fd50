"""The GPU backends on whole linears (lab 4.4), against float64 sums row by row."""

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.gpu import triton_backend
from minivllm.gpu.pages import backend as paged_backend
from minivllm.gpu.sgmv import tuning
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.vllm.punica_selector import get_punica_wrapper
from minivllm.vllm.utils import from_layer
from tests.tools.device import DEVICE
from tests.tools.memory import (
    DTYPES,
    TOLERANCE,
    assert_rows_close,
    exact_expand,
    exact_shrink,
    random,
    random_slots,
)

SLOTS, RANK, WIDTH = 3, 8, 40
LINEARS = {
    "row": lambda dtype: (RowParallelLinear(WIDTH, 33, True, dtype, DEVICE), []),
    "no bias": lambda dtype: (RowParallelLinear(WIDTH, 24, False, dtype, DEVICE), []),
    "gate_up": lambda dtype: (MergedColumnParallelLinear(WIDTH, [20, 12], True, dtype, DEVICE), ["g", "u"]),
    "qkv": lambda dtype: (QKVParallelLinear(WIDTH, 6, 4, 2, True, dtype, DEVICE), ["q", "k", "v"]),
}
BACKENDS = [pytest.param("triton", marks=pytest.mark.lab("4.4")), "paged"]


class Linear:
    """A wrapped linear with an adapter of its own rank for every slice in slots 0 and 2; slot 1 is free.

    ids: slot -> adapter id
    punica: of another linear that shares it; None = one of its own
    """

    ids = (11, None, 13)

    def __init__(self, backend, kind="qkv", dtype=torch.float32, rank=RANK, punica=None):
        config = LoRAConfig(rank, SLOTS, lora_dtype=dtype, punica_backend=backend)
        if punica is not None:
            self.punica = punica
        elif backend == "triton":  # under vLLM's names
            self.punica = get_punica_wrapper(64, 64, DEVICE, lora_config=config)
        else:
            self.punica = make_backend(64, 64, DEVICE, config, LORA_EXTENSIONS)
        base, parts = LINEARS[kind](dtype)
        for i, parameter in enumerate(base.parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=i))
        self.weight, self.bias = base.weight.double().cpu(), base.bias
        self.layer = from_layer(base, SLOTS, config, parts)
        self.layer.set_mapping(self.punica)
        self.dtype, self.rank, self.base = dtype, rank, base
        self.ranks = [[0] * SLOTS for _ in self.layer.output_slices]
        self.a = [torch.zeros(SLOTS, rank, WIDTH, dtype=dtype) for _ in self.ranks]
        self.b = [torch.zeros(SLOTS, width, rank, dtype=dtype) for width in self.layer.output_slices]
        self.put(0, [rank, 3, 5], seed=1)
        self.put(2, [2, 0, rank - 1], seed=2)

    def put(self, slot, ranks, seed):
        lora_a, lora_b = [], []
        for i, width in enumerate(self.layer.output_slices):
            self.ranks[i][slot] = live = ranks[i]
            a = random(live, WIDTH, dtype=self.dtype, seed=100 * seed + i)
            b = random(width, live, dtype=self.dtype, seed=100 * seed + 50 + i)
            self.a[i][slot, :live], self.b[i][slot, :, :live] = a, b
            lora_a.append(a if live else None)
            lora_b.append(b if live else None)
        self.layer.set_lora(slot, lora_a, lora_b)

    def step(self, token_slots, prompt_slots=None):
        """prompt_slots: of the sampled rows, None = every token is sampled"""
        tokens, prompts = (
            [0 if slot < 0 else self.ids[slot] for slot in slots.tolist()]
            for slots in (token_slots, token_slots if prompt_slots is None else prompt_slots)
        )
        self.punica.begin_step(LoRAMapping(tokens, prompts), list(self.ids))

    @torch.inference_mode()
    def run(self, x):
        y = self.layer(x.to(DEVICE))[0]
        assert isinstance(y, torch.Tensor), f"linear returned {y!r}, not the (T, N) output"
        return y.cpu()

    def assert_answers(self, x, token_slots, tolerance=3e-6, what="y"):
        """A pass over x gives every row what `expected` says."""
        assert_rows_close(self.run(x), self.expected(x, token_slots), token_slots, tolerance, what)

    def expected(self, x, token_slots):
        y = x.double() @ self.weight.T
        if self.bias is not None:
            y = y + self.bias.double().cpu()
        h = exact_shrink(x, self.a, token_slots, self.ranks)
        return exact_expand(h, self.b, y, token_slots, self.ranks)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def some_slots(tokens, seed=0):
    slots = random_slots(tokens, 2, seed=seed)
    return torch.where(slots == 1, 2, slots)


BATCHES = [
    *((kind, torch.float32, tokens) for kind in LINEARS for tokens in (1, 18)),
    ("qkv", torch.float32, 50),
    *(("gate_up", dtype, 18) for dtype in DTYPES if dtype is not torch.float32),
]


@pytest.mark.parametrize(("kind", "dtype", "tokens"), BATCHES)
def test_every_row_gets_its_own_adapter(backend, kind, dtype, tokens):
    linear, token_slots = Linear(backend, kind, dtype), some_slots(tokens, seed=tokens)
    token_slots[0] = 2
    x = random(tokens, WIDTH, dtype=dtype, seed=9)

    linear.step(token_slots)

    linear.assert_answers(x, token_slots, TOLERANCE[dtype])


@pytest.mark.lab("4.4")
def test_a_step_that_samples_nobody_has_an_empty_index_of_whole_numbers():
    linear = Linear("triton")

    linear.step(torch.tensor([2, -1]), torch.tensor([], dtype=torch.long))

    indices = linear.punica.token_lora_indices, linear.punica.sampler_indices
    assert [(index.tolist(), index.dtype) for index in indices] == [([2, -1], torch.long), ([], torch.long)]


@pytest.mark.lab("4.4")
def test_a_step_without_adapters_makes_no_tile_lists(monkeypatch):
    linear, made = Linear("triton"), []
    for meta in (linear.punica.token_meta, linear.punica.prompt_meta):
        monkeypatch.setattr(type(meta), "prepare_tensors", lambda self, slots: made.append(slots.tolist()))

    linear.step(torch.tensor([-1, -1]))
    assert made == []
    linear.step(torch.tensor([-1, 0]), torch.tensor([0]))

    assert made == [[-1, 0], [0]]


@pytest.mark.parametrize("rank", [5, 16, 40])
def test_any_rank_will_do(backend, rank):
    linear, token_slots = Linear(backend, "gate_up", rank=rank), some_slots(20)
    x = random(20, WIDTH, seed=9)

    linear.step(token_slots)

    linear.assert_answers(x, token_slots)


def test_base_rows_are_untouched_whatever_shares_the_batch(backend):
    """INCIDENTS 1: the last slot's adapter among them."""
    linear, x = Linear(backend), random(20, WIDTH, seed=9)
    token_slots = some_slots(20)
    token_slots[-1] = 2

    linear.step(token_slots)
    mixed = linear.run(x)

    linear.layer.set_lora(2, [None] * 3, [None] * 3)
    linear.layer.set_lora(0, [None] * 3, [None] * 3)
    linear.step(token_slots)
    base = token_slots < 0
    assert_rows_close(
        mixed[base], linear.run(x)[base], token_slots[base], 0, "base rows with and without adapters"
    )


def test_a_batch_without_adapters_is_the_base_layer_alone(backend, monkeypatch):
    linear, x = Linear(backend), random(20, WIDTH, seed=9)
    linear.step(some_slots(20))  # what this leaves behind must not be used again
    linear.run(x)
    module, prefix = {"triton": (triton_backend, ""), "paged": (paged_backend, "paged_")}[backend]
    for name in (f"{prefix}shrink", f"{prefix}expand"):
        monkeypatch.setattr(
            module, name, lambda *args, name=name, **kwargs: pytest.fail(f"a batch of base rows ran {name}")
        )

    linear.step(torch.full((20,), -1))

    assert linear.punica.no_lora
    linear.assert_answers(x, torch.full((20,), -1))


def test_the_highest_slot_counts_beside_base_rows(backend):
    """INCIDENTS 13: as many adapters as slots, and base rows that the count forgot."""
    linear, x = Linear(backend), random(4, WIDTH, seed=9)
    linear.ids = (11, 12, 13)
    linear.put(1, [1, 4, 2], seed=3)
    token_slots = torch.tensor([-1, 2, 0, 1])

    linear.step(token_slots)

    linear.assert_answers(x, token_slots)


def test_a_slot_written_anew_is_served_at_once_with_its_new_rank(backend):
    linear, token_slots, x = Linear(backend), some_slots(20), random(20, WIDTH, seed=9)
    linear.step(token_slots)
    linear.run(x)

    for ranks in ([8, 8, 8], [1, 0, 2]):
        linear.a = [a.index_fill(0, torch.tensor([2]), 0) for a in linear.a]
        linear.put(2, ranks, seed=sum(ranks))
        linear.punica.sync_slots()

        linear.assert_answers(x, token_slots)


def test_several_layers_keep_their_ranks_apart(backend):
    """Layers of one model share the backend, and each has live ranks of its own."""
    first = Linear(backend, "qkv")
    second = Linear(backend, "gate_up", punica=first.punica)
    first.put(0, [RANK, 3, 5], seed=1)  # once all layers are there
    first.put(2, [2, 0, RANK - 1], seed=2)
    second.put(0, [1, RANK], seed=3)
    second.put(2, [RANK, 4], seed=4)
    token_slots, x = some_slots(20), random(20, WIDTH, seed=9)

    first.step(token_slots)

    first.assert_answers(x, token_slots)
    second.assert_answers(x, token_slots)


@pytest.mark.lab("4.4")
def test_vllms_steps_add_up_to_the_same():
    """add_lora_linear, with and without a buffer, on layers that keep zeros past the live ranks."""
    linear, token_slots, x = Linear("triton"), some_slots(20), random(20, WIDTH, seed=9)
    layer, punica = linear.layer, linear.punica
    linear.step(token_slots)
    stacked = layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices
    buffer = torch.full((3, 20, RANK), float("nan"), device=DEVICE)

    at_once = layer.base_layer(x.to(DEVICE))[0]
    by_steps = at_once.clone()
    punica.add_lora_linear(at_once, x.to(DEVICE), *stacked)
    punica.add_lora_linear(by_steps, x.to(DEVICE), *stacked, buffer=buffer)

    expected = linear.expected(x, token_slots)
    assert_rows_close(at_once, expected, token_slots, 3e-6, "y, at once")
    assert_rows_close(by_steps, expected, token_slots, 3e-6, "y, by steps")


@pytest.mark.lab("4.4")
def test_tokens_and_sampled_rows_have_a_tile_list_each():
    """Embeddings are adapted token by token, logits by sampled row."""
    linear = Linear("triton", "row")
    a, b, ranks = linear.a[0], linear.b[0], [[RANK] * SLOTS]
    token_slots, prompt_slots = torch.tensor([2, -1, 0, 0, 2]), torch.tensor([0, 2])
    linear.step(token_slots, prompt_slots)
    h, embedded = random(5, RANK, seed=5), random(5, 33, seed=6)
    x, logits = random(2, WIDTH, seed=7), random(2, 33, seed=8)

    y, z = embedded.clone().to(DEVICE), logits.clone().to(DEVICE)
    linear.punica.add_lora_embedding(y, h.to(DEVICE), b[:, None].to(DEVICE))
    linear.punica.add_lora_logits(z, x.to(DEVICE), a[:, None].to(DEVICE), b[:, None].to(DEVICE), 0.5)

    expected = exact_expand(h[None], [b], embedded, token_slots, ranks)
    assert_rows_close(y, expected, token_slots, 3e-6, "embeddings")
    shrunk = exact_shrink(x, [a], prompt_slots, ranks, 0.5)
    expected = exact_expand(shrunk, [b], logits, prompt_slots, ranks)
    assert_rows_close(z, expected, prompt_slots, 3e-6, "logits")


@pytest.mark.lab("4.4")
def test_a_linear_of_three_slices_takes_two_launches(monkeypatch):
    linear, token_slots = Linear("triton", "qkv"), torch.tensor([2, -1, 0])
    linear.step(token_slots)
    launches = []
    for name in ("shrink", "expand"):
        kernel = getattr(triton_backend, name)

        def counted(*args, name=name, kernel=kernel, **kwargs):
            launches.append(name)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(triton_backend, name, counted)

    linear.run(random(3, WIDTH, seed=9))

    assert launches == ["shrink", "expand"], f"launched for one linear: {launches}"


@pytest.mark.lab("4.4")
def test_linears_of_a_step_share_its_tile_list_and_run_the_base_layer_once(monkeypatch):
    """What a step prepares, it prepares for all layers: each time more would cost every linear of the model."""
    linear, x = Linear("triton", "qkv"), random(3, WIDTH, seed=9)
    work, forward = [], linear.base.forward
    linear.step(torch.tensor([2, -1, 0]))
    for name, of in (
        ("prepare_tensors", type(linear.punica.token_meta)),
        ("sync_slots", type(linear.punica.backend)),
    ):
        monkeypatch.setattr(of, name, lambda *args, name=name: work.append(name))
    monkeypatch.setattr(linear.base, "forward", lambda x: work.append("base") or forward(x))

    for _ in range(2):
        linear.run(x)

    assert work == ["base", "base"], "of two linears with adapters in one step"
    monkeypatch.setattr(linear.punica.backend, "no_lora", True)
    linear.run(x)
    assert work == ["base"] * 3, "and of one without"


@pytest.mark.lab("4.4")
@pytest.mark.parametrize("rank", [8, 40])
def test_what_lies_past_an_adapters_rank_is_not_read(rank):
    """A short adapter does not pay for the longest rank, but for B where rows of it are as short as a read."""
    linear, token_slots = Linear("triton", "qkv", rank=rank), torch.tensor([2, -1, 0, 2])
    for i in range(3):
        for slot in (0, 2):
            live = linear.ranks[i][slot]
            linear.layer.lora_a_stacked[i][slot, :, live:] = float("nan")
            if rank == 40:
                linear.layer.lora_b_stacked[i][slot, ..., live:] = float("nan")

    linear.step(token_slots)

    linear.assert_answers(random(4, WIDTH, seed=9), token_slots, what="y, all past the live ranks being NaN")


@pytest.mark.lab("4.4")
def test_a_step_says_which_slots_it_has_and_whether_any():
    linear = Linear("triton", "row")

    linear.step(torch.tensor([-1, 2, 0, 0]), torch.tensor([2, -1]))

    punica = linear.punica
    assert punica.token_lora_indices.tolist() == [-1, 2, 0, 0]
    assert punica.sampler_indices.tolist() == [2, -1]
    assert not punica.no_lora
    linear.step(torch.tensor([-1, -1, -1]))
    assert punica.no_lora
    assert punica.token_lora_indices.tolist() == punica.sampler_indices.tolist() == [-1, -1, -1]


@pytest.mark.lab("4.4")
@pytest.mark.parametrize(
    ("token_slots", "prompt_slots"),
    [
        ([0], [0]),
        ([0, -1, -1], [0, -1]),
        ([2, 2, 2], []),
        ([2, 2, -1], [-1]),
        ([-1, 0, 0, 2], [2]),
        ([0, 0, 2, 2, -1], [2, 0, -1]),
    ],
    ids=["the first slot alone", "and base", "a chunk alone", "base samples", "one samples", "two requests"],
)
def test_tokens_have_their_adapters_whoever_samples(token_slots, prompt_slots):
    """A linear runs on tokens; the sampled rows are for the logits, and a chunk of a prompt has none."""
    linear, token_slots = Linear("triton", "gate_up"), torch.tensor(token_slots)
    linear.step(torch.where(token_slots == 2, 0, 2))  # what this leaves behind must not be used again

    linear.step(token_slots, torch.tensor(prompt_slots, dtype=torch.long))

    assert not linear.punica.no_lora, (
        f"`no_lora` turns adapters off, and the tokens have the slots {token_slots.tolist()}"
    )
    linear.assert_answers(random(len(token_slots), WIDTH, seed=9), token_slots)


@pytest.mark.lab("4.4")
@pytest.mark.parametrize(("tokens", "prompts"), [((99, 11), (11,)), ((11, 11), (99,))])
def test_a_step_with_an_adapter_in_no_slot_is_refused_and_changes_nothing(tokens, prompts):
    linear, token_slots = Linear("triton", "row"), torch.tensor([2, -1])
    linear.step(token_slots)

    with pytest.raises(ValueError, match="99"):
        linear.punica.update_metadata(LoRAMapping(tokens, prompts), list(linear.ids), SLOTS + 1, 50)

    assert linear.punica.token_lora_indices.tolist() == [2, -1]
    linear.assert_answers(random(2, WIDTH, seed=9), token_slots)


def test_tile_sizes_are_what_tensor_cores_take():
    for tokens in (1, 16, 512, 513, 8192):
        assert tuning.block_rows(tokens) >= 16
        for rank in (1, 16, 64, 256):
            assert tuning.expand_tiles(tokens, rank, 14336).block_n >= 16
            for width in (16, 4096, 14336):
                tiles = tuning.shrink_tiles(tokens, width, rank, 8)
                assert tiles.block_k >= 16
                assert tiles.splits >= 1
