"""The linears back to the model's width leave what adapters add to the norm that reads them, in steps of few tokens."""

import pytest
import torch
from gpu import DEVICE
from test_layer_kernels import rms
from test_mixed_graphs import graphed_engine
from test_runner_graphs import MIXED, add, assert_tokens_are_right
from tiny_engine import run, tiny_world

from minivllm.config import LoRAConfig
from minivllm.distributed.tensor_parallel import TensorParallel
from minivllm.layers.linear import LinearBase, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.lora.gpu import folded_backend, paged_backend, readers
from minivllm.lora.gpu.ops.adapted_norm_op import adapted_norm
from minivllm.lora.gpu.ops.paged_tuning import MOST_NORM_TOKENS
from minivllm.lora.layers import LoRAMapping
from minivllm.lora.model_manager import make_backend
from minivllm.lora.replace import from_layer

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
    """They leave sums to norms, as processes do whose GPUs read each other's memory."""

    def all_reduce_before(self, norm, x):
        def rest(x, residual):
            residual += self.all_reduce(x)
            return rms(residual, norm.weight, norm.eps).to(x.dtype)

        norm.rest = rest
        return x


class Down:
    """A linear with adapters of unlike ranks in slots 0 and 2, and the norm behind it."""

    def __init__(self, backend, dtype=torch.float32, rank=8, processes=1, kind=TwoProcesses):
        config = LoRAConfig(rank, SLOTS, lora_dtype=dtype, punica_backend=backend)
        self.dtype, self.punica = dtype, make_backend(256, 256, DEVICE, config)
        group = {} if processes == 1 else {"tp": kind(0, 2)}
        self.base = RowParallelLinear(INNER * processes, WIDTH, True, dtype, DEVICE, **group)
        pick = torch.Generator().manual_seed(0)
        for parameter in self.base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=pick))
        self.layer = from_layer(self.base, SLOTS, config, ["down"])
        self.layer.set_mapping(self.punica)
        self.norm = RMSNorm(WIDTH, EPS, dtype, DEVICE)
        self.norm.weight.copy_(torch.rand(WIDTH, generator=pick) + 0.5)
        self.base.__dict__["read_by"] = self.norm
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

    def run(self, x, residual):
        """What the norm gives, and the residual after it."""
        with torch.inference_mode():
            normed, stream = self.norm(self.layer(x.to(DEVICE))[0], residual.clone().to(DEVICE))
        return normed.cpu(), stream.cpu()

    def product(self, x, slots):
        """(T, H) with adapters, of one process."""
        y = x.double() @ self.base.weight.double().cpu().T + self.base.bias.double().cpu()
        for row, slot in enumerate(slots):
            if slot in self.weights:
                a, b = self.weights[slot]
                y[row] += b @ (a @ x[row].double())
        return y

    def assert_answers(self, slots, more=0.0, processes=1, seed=0):
        """`more`: what else is added to the product"""
        x, residual = rows(len(slots), self.dtype, seed)
        expected = residual.double() + processes * self.product(x, slots) + more
        normed, stream = self.run(x, residual)
        for found, exact in ((stream, expected), (normed, rms(expected, self.norm.weight.cpu(), EPS))):
            error = (found.double() - exact).abs().max()
            assert error <= CLOSE[self.dtype] * exact.abs().max()
        assert self.norm.rest is None
        return normed, stream


def rows(count, dtype=torch.float32, seed=0):
    """(T, K) and residuals (T, H)"""
    pick = torch.Generator().manual_seed(100 * seed + count)
    x, residual = (torch.randn(count, width, generator=pick) for width in (INNER, WIDTH))
    return (x / 8).to(dtype), (3 * residual).to(dtype)


@pytest.fixture(params=["paged", "folded"])
def backend(request):
    return request.param


@pytest.fixture
def told(monkeypatch):
    """Of each step, whether the norm was left anything."""
    found = []

    def leave(base, rest):
        found.append(rest is not None)
        readers.leave(base, rest)

    for module in (paged_backend, folded_backend):
        monkeypatch.setattr(module, "leave", leave)
    return found


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.float32, 20), (torch.float16, 20)])
def test_the_norm_adds_every_rows_adapters_share(backend, dtype, rank, mixture, told):
    down = Down(backend, dtype, rank)
    down.step(MIXTURES[mixture])

    down.assert_answers(MIXTURES[mixture])

    assert told[-1] == (mixture != "base")


def test_the_norm_is_of_the_residual_as_it_is_kept(backend):
    down, slots = Down(backend, torch.float16), [0, 2, -1, 0, 2, 2, 0, 1] * 4
    down.step(slots)

    normed, stream = down.assert_answers(slots)

    exact = rms(stream, down.norm.weight.cpu(), EPS).half()
    assert (normed != exact).float().mean() < 0.01


def test_what_a_hook_adds_to_the_product_is_there_too(backend):
    down, slots = Down(backend), [0, 2, -1, 0, 1, 2]
    down.layer.register_forward_hook(lambda layer, inputs, output: (output[0] + 0.5, None))

    down.step(slots)

    down.assert_answers(slots, more=0.5)


@pytest.mark.parametrize(
    "slots", [[-1] * 4, [2, -1, 0, 0], [0] * (MOST_NORM_TOKENS + 1)], ids=["base", "few", "many"]
)
def test_a_step_finds_nothing_of_one_that_ended_before_its_norm(backend, slots):
    down = Down(backend)
    down.step([0, 2, 0, -1])
    with torch.inference_mode():
        down.layer(rows(4)[0].to(DEVICE))
    assert down.norm.rest is not None

    down.step(slots)

    down.assert_answers(slots, seed=1)


def test_nor_does_one_that_folding_does_not_pay_for(monkeypatch):
    down = Down("folded")
    down.step([0, 2, 0, -1])
    with torch.inference_mode():
        down.layer(rows(4)[0].to(DEVICE))

    monkeypatch.setattr(folded_backend, "fold_pays", lambda *shape: False)

    down.assert_answers([0, 2, 0, -1], seed=1)


def test_a_long_step_leaves_the_norm_nothing(backend, told):
    down, slots = Down(backend), [0, -1, 2] * 50
    down.step(slots)

    down.assert_answers(slots)

    assert told[-1] is False


@pytest.mark.parametrize(("rank", "is_left"), [(32, True), (33, False), (64, False), (72, False)])
def test_a_high_rank_leaves_the_norm_nothing(backend, rank, is_left, told):
    down, slots = Down(backend, rank=rank), [0, -1, 2]
    down.step(slots)

    down.assert_answers(slots)

    assert told[-1] is is_left


def test_one_of_several_processes_leaves_nothing_since_the_norm_reads_a_sum(backend, told):
    down, slots = Down(backend, processes=2), [0, -1, 2, 2]
    down.step(slots)

    down.assert_answers(slots, processes=2)

    assert told[-1] is False


@pytest.mark.parametrize("slots", [[-1] * 4, [0, -1, 2, 2]], ids=["base", "mixed"])
def test_what_a_backend_leaves_takes_no_sum_from_the_norm(backend, slots, told):
    down = Down(backend, processes=2, kind=TwoThatNorm)
    for seed in range(2):
        down.step(slots)

        down.assert_answers(slots, processes=2, seed=seed)

    assert not any(told)


def test_rows_have_the_same_bits_in_every_batch_where_that_is_asked(told):
    down, slots = Down("invariant"), [0, 2, -1, 0]
    down.step(slots)

    down.assert_answers(slots)

    assert not any(told)


@pytest.mark.parametrize("name", ["paged", pytest.param("folded", marks=pytest.mark.nightly_without_gpu)])
def test_an_engine_answers_with_norms_that_add_what_adapters_add(tmp_path_factory, monkeypatch, name):
    launched = []
    monkeypatch.setattr(
        readers, "adapted_norm", lambda *args: (launched.append(len(args[-2])), adapted_norm(*args))[1]
    )
    monkeypatch.setattr(
        LinearBase, "pack", lambda self: None
    )  # for a CPU, where folding finds no weight then
    world = tiny_world(tmp_path_factory)
    engine = graphed_engine(world, decode_graphs=True, punica_backend=name, max_num_batched_tokens=20)

    add(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert len(launched) > 10
