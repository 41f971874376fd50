"""The linears back to the model's width leave what adapters add to the norm that reads them, where that saves time."""

import pytest
import torch
from test_layer_kernels import rms

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.gpu.fused import FusedRMSNorm, blocks
from minivllm.gpu.fused.blocks import AddAndNorm, Pending, linear_deferred
from minivllm.gpu.kernels import paged_tuning
from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.paged_tuning import MOST_NORM_TOKENS, norm_adds
from minivllm.layers.linear import RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import ONE_RANK
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.lora.wrapping import from_layer
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.tools.device import DEVICE, compile_for_gpu
from tests.worlds.engines import run, tiny_world
from tests.worlds.gpu import add_requests, assert_tokens_are_right, graphed_engine

INNER, WIDTH, SLOTS, EPS = 48, 40, 3, 1e-3
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3}
MIXTURES = {
    "one": [0],
    "mixed": [2, -1, 0, 0, 2, -1, 1],
    "half": [-1, 0] * 9,
    "base": [-1] * 4,
    "other": [2] * 5,
}


class TwoProcesses(TensorParallel):
    """The first of two; the other's terms are as large as its own."""

    def all_reduce(self, x):
        return 2 * x


class TwoThatNorm(TwoProcesses):
    """Their norms sum, as those of processes do whose GPUs read each other's memory.

    normed, adapted   rows of each such norm, and of each that added what adapters add, too
    """

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.normed, self.adapted = [], []

    def add_and_norm(self, x, residual, weight, eps):
        self.normed.append(len(x))
        residual += self.all_reduce(x)
        return rms(residual, weight, eps).to(x.dtype)

    def add_adapters_and_norm(self, update, slots, x, residual, weight, eps):
        return None


class TwoThatAdd(TwoThatNorm):
    """Their norms can add what adapters add, too: the other's terms of h are as large as its own."""

    def add_adapters_and_norm(self, update, slots, x, residual, weight, eps):
        """Stands for `peer_norm` with an update, for which others would have to send their terms."""
        self.adapted.append(len(x))
        update = update._replace(h=2 * update.h)
        return adapted_norm(update, slots, weight, eps, self.all_reduce(x), residual)


class Down:
    """A linear with adapters of unlike ranks in slots 0 and 2, and the norm behind it."""

    def __init__(
        self, dtype=torch.float32, rank=8, processes=1, kind=TwoProcesses, tokens=256, backend="paged"
    ):
        config = LoRAConfig(rank, SLOTS, lora_dtype=dtype, punica_backend=backend)
        self.dtype, self.punica = dtype, make_backend(tokens, tokens, DEVICE, config, LORA_EXTENSIONS)
        self.tp = ONE_RANK if processes == 1 else kind(0, 2)
        self.base = RowParallelLinear(INNER * processes, WIDTH, True, dtype, DEVICE, tp=self.tp)
        pick = torch.Generator().manual_seed(0)
        for parameter in self.base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=pick))
        self.layer = from_layer(self.base, SLOTS, config, ["down"])
        self.layer.set_mapping(self.punica)
        self.norm = RMSNorm(WIDTH, EPS, dtype, DEVICE)
        self.norm.weight.copy_(torch.rand(WIDTH, generator=pick) + 0.5)
        if DEVICE == "cuda":
            self.norm = FusedRMSNorm(self.norm)
        self.add_and_norm = AddAndNorm(self.tp)
        self.weights = {}
        for slot, live in {0: rank, 2: rank // 2 + 1}.items():
            a, b = (
                torch.randn(live, INNER * processes, generator=pick),
                torch.randn(WIDTH, live, generator=pick),
            )
            self.layer.set_lora(slot, [a.to(dtype)], [b.to(dtype)])
            self.weights[slot] = a[:, :INNER].to(dtype).double(), b.to(dtype).double()

    def step(self, slots):
        ids = [slot + 1 for slot in slots]
        self.punica.begin_step(LoRAMapping(ids, ids, is_prefill=True), list(range(1, SLOTS + 1)))

    def run(self, x, residual, is_term=True):
        """What the norm gives, and the residual after it."""
        stream = residual.clone().to(DEVICE)
        with torch.inference_mode():
            pending = Pending(*linear_deferred(self.layer, x.to(DEVICE)), is_term)
            normed = self.add_and_norm(pending, stream, self.norm)
        return normed.cpu(), stream.cpu()

    def product(self, x, slots):
        """(T, H) with adapters, of one process."""
        y = x.double() @ self.base.weight.double().cpu().T + self.base.bias.double().cpu()
        for row, slot in enumerate(slots):
            if slot in self.weights:
                a, b = self.weights[slot]
                y[row] += b @ (a @ x[row].double())
        return y

    def assert_answers(self, slots, more=0.0, processes=1, seed=0, is_term=True):
        """`more`: what else is added to the product"""
        x, residual = rows(len(slots), self.dtype, seed)
        expected = residual.double() + processes * self.product(x, slots) + more
        normed, stream = self.run(x, residual, is_term)
        for found, exact in ((stream, expected), (normed, rms(expected, self.norm.weight.cpu(), EPS))):
            error = (found.double() - exact).abs().max()
            assert error <= CLOSE[self.dtype] * exact.abs().max()
        return normed, stream


def rows(count, dtype=torch.float32, seed=0):
    """(T, K) and residuals (T, H)"""
    pick = torch.Generator().manual_seed(100 * seed + count)
    x, residual = (torch.randn(count, width, generator=pick) for width in (INNER, WIDTH))
    return (x / 8).to(dtype), (3 * residual).to(dtype)


@pytest.fixture
def launched(monkeypatch):
    """Rows of each norm that adds what adapters add."""
    found = []

    def watched(*args):
        found.append(len(args[-1]))
        return adapted_norm(*args)

    monkeypatch.setattr(blocks, "adapted_norm", watched)
    return found


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.float32, 20), (torch.float16, 20)])
def test_the_norm_adds_every_rows_adapters_share(dtype, rank, mixture, launched):
    down = Down(dtype, rank)
    down.step(MIXTURES[mixture])

    down.assert_answers(MIXTURES[mixture])

    assert launched == [len(MIXTURES[mixture])] * (mixture != "base")


def test_the_norm_is_of_the_residual_as_it_is_kept():
    down, slots = Down(torch.float16), [0, 2, -1, 0, 2, 2, 0, 1] * 4
    down.step(slots)

    normed, stream = down.assert_answers(slots)

    exact = rms(stream, down.norm.weight.cpu(), EPS).half()
    assert (normed != exact).float().mean() < 0.01


def test_what_a_hook_adds_to_the_product_is_there_too():
    down, slots = Down(), [0, 2, -1, 0, 1, 2]
    down.layer.register_forward_hook(lambda layer, inputs, output: (output[0] + 0.5, None))

    down.step(slots)

    down.assert_answers(slots, more=0.5)


@pytest.mark.parametrize(
    "slots", [[-1] * 4, [2, -1, 0, 0], [0] * (MOST_NORM_TOKENS + 1)], ids=["base", "few", "many"]
)
def test_a_step_finds_nothing_of_one_that_ended_before_its_norm(slots):
    down = Down()
    down.step([0, 2, 0, -1])
    with torch.inference_mode():
        _, left = linear_deferred(down.layer, rows(4)[0].to(DEVICE))
    assert left is not None

    down.step(slots)

    down.assert_answers(slots, seed=1)


@pytest.mark.parametrize(
    ("tokens", "rank", "expected"),
    [(1, 16, True), (128, 32, True), (128, 33, False), (129, 8, False), (8192, 4, False)],
)
def test_a_norm_adds_what_adapters_add_in_short_steps_of_few_ranks(tokens, rank, expected):
    assert norm_adds(tokens, rank) == expected


@pytest.mark.parametrize(("rank", "is_left"), [(32, True), (33, False), (64, False), (72, False)])
def test_what_a_high_rank_adds_is_added_before_the_norm(rank, is_left, launched):
    down, slots = Down(rank=rank), [0, -1, 2]
    down.step(slots)

    down.assert_answers(slots)

    assert launched == [3] * is_left


def test_one_of_several_processes_adds_it_to_its_term_since_the_norm_reads_a_sum(launched):
    down, slots = Down(processes=2), [0, -1, 2, 2]
    down.step(slots)

    down.assert_answers(slots, processes=2)

    assert launched == []


@pytest.mark.parametrize("slots", [[-1] * 4, [0, -1, 2, 2]], ids=["base", "mixed"])
def test_what_a_backend_leaves_takes_no_sum_from_the_norm(slots, launched):
    down = Down(processes=2, kind=TwoThatNorm)
    for seed in range(2):
        down.step(slots)

        down.assert_answers(slots, processes=2, seed=seed)

    assert launched == [] and down.tp.normed == [4, 4]


@pytest.mark.parametrize(
    "slots", [[-1] * 4, [2, -1, 0, 0], [0] * (MOST_NORM_TOKENS + 1)], ids=["base", "few", "many"]
)
def test_a_norm_that_sums_adds_few_rows_adapters_and_finds_nothing_of_a_step_before(slots):
    down = Down(processes=2, kind=TwoThatAdd)
    down.step([0, 2, 0, -1])
    with torch.inference_mode():
        linear_deferred(down.layer, rows(4)[0].to(DEVICE))  # a step that ends before its norm

    down.step(slots)
    down.assert_answers(slots, processes=2, seed=1)

    few_with_adapters = slots[0] == 2
    assert down.tp.adapted == [4] * few_with_adapters
    assert down.tp.normed == [len(slots)] * (not few_with_adapters)


@pytest.mark.parametrize("slots", [[-1] * 4, [0, -1, 2, 2]], ids=["base", "mixed"])
def test_what_is_no_term_is_not_summed_by_a_norm_of_several_processes(slots):
    down = Down(processes=2, kind=TwoThatAdd)
    down.step(slots)

    down.assert_answers(slots, is_term=False)

    assert down.tp.adapted == down.tp.normed == []


def test_rows_have_the_same_bits_in_every_batch_where_that_is_asked(launched):
    down, slots = Down(backend="invariant"), [0, 2, -1, 0]
    down.step(slots)

    down.assert_answers(slots)

    assert launched == []


@pytest.mark.nightly_without_gpu
def test_an_engine_answers_with_norms_that_add_what_adapters_add(tmp_path_factory, monkeypatch, launched):
    monkeypatch.setattr(paged_tuning, "MOST_NORM_TOKENS", 8)
    world = tiny_world(tmp_path_factory)
    engine = graphed_engine(world, "decodes", "mixed", punica_backend="paged", max_num_batched_tokens=20)
    if DEVICE == "cpu":
        launched.clear()  # where graphs are replayed, they were launched when these were captured

    names = ["mlp", None, "all"]
    add_requests(engine, world, names)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names)
    assert len(launched) > 10


@pytest.mark.nightly
def test_kernels_that_add_what_adapters_add_compile_for_a_gpu_once_for_short_steps(tmp_path):
    done = compile_for_gpu("readers", cache=tmp_path)

    assert done.stdout == "compiled\n", done.stderr
