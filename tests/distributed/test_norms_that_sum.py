"""Norms that are left with the sum over processes, where these can: a model's answers are those of transformers and
PEFT. Threads play the processes, and plain arithmetic the kernel.
"""

import lockstep
import pytest
import torch
import torch.nn.functional as F
from shared_engines import assert_shared_engines_answer, engines_in_lockstep, serve
from test_shared_adapters import LINEARS, pairs_of
from tiny_models import VARIANTS, PagedRequests, reference_logits, token_ids, transformers_model
from tiny_set import AdapterSet

from minivllm.gpu import readers
from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.layers.linear import LinearBase, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import ONE_RANK
from minivllm.models.registry import get_model

MOST_ROWS = 8  # more are summed before
PLAIN = {name: {**config, "lora_bias": False} for name, config in LINEARS.items()}


class ThreadThatNorms(lockstep.ThreadOfMany):
    """Leaves the sums of few rows to norms. `left`: how many; `with_adapters`: how many that add adapters, too."""

    left = with_adapters = 0

    def words_for(self, x):
        return self if len(x) <= MOST_ROWS else None

    def all_reduce_before(self, norm, x):
        if len(x) > MOST_ROWS:
            norm.rest = None
            return self.all_reduce(x)

        def rest(x, residual):
            residual += self.all_reduce(x)
            return F.rms_norm(residual, norm.weight.shape, norm.weight, norm.eps)

        norm.rest, self.left = rest, self.left + 1
        return x


def by_thread(update, slots, weight, eps, tp, x, residual):
    """Stands for `adapted_peer_norm`, with a thread for its words."""
    tp.with_adapters += 1
    wide = len(x), update.h_slot_stride * len(update.b[0]) or update.rank
    h = tp.all_reduce(update.h[0].as_strided(wide, update.h.stride()[1:]))  # of all slots
    return adapted_norm(update._replace(h=h[None]), slots, weight, eps, tp.all_reduce(x), residual)


@pytest.fixture(autouse=True)
def threads_can(monkeypatch):
    monkeypatch.setattr(lockstep, "ThreadOfMany", ThreadThatNorms)
    monkeypatch.setattr(readers, "adapted_peer_norm", by_thread)


def rests(model):
    return [module.rest for module in model.modules() if isinstance(module, RMSNorm)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_has_the_logits_of_transformers_in_steps_of_few_rows_and_of_many(variant, tmp_path):
    texts, steps = [token_ids(n, seed=n) for n in (9, 1, 14)], [[(0, 5), (1, 1)], [(0, 4), (2, 9)], [(2, 5)]]
    transformers_model(variant).save_pretrained(tmp_path)
    expected = [reference_logits(transformers_model(variant), text, torch.float64) for text in texts]

    def work(tp):
        model = get_model(tmp_path, torch.float64, tp=tp)
        return PagedRequests(model, texts).run(steps), rests(model), tp.left

    for logits, left, count in lockstep.in_lockstep(2, work):
        for found, reference in zip(logits, expected, strict=True):
            assert torch.allclose(found, reference, rtol=1e-9, atol=1e-9)
        assert left == [None] * len(left)
        # Of two layers' attention always, in the two steps that are not too large; of dense MLPs, too.
        assert count in (4, 6, 8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return AdapterSet(tmp_path_factory.mktemp("plain"), "llama-llama3-rope", PLAIN)


@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
def test_adapters_are_in_the_terms_that_norms_sum(world, monkeypatch, fully):
    pairs = pairs_of(world)
    expected = [world.answer(name, prompt, 4) for name, prompt in pairs]

    def work(tp):
        engine = world.engine(max_loras=3, max_cpu_loras=6, fully_sharded_loras=fully)
        return serve(engine, world, pairs, 4), rests(engine.runner.model), tp.left

    for answers, left, count in engines_in_lockstep(monkeypatch, 2, work):
        assert answers == expected and left == [None] * len(left) and count > 0


@pytest.mark.parametrize("backend", ["paged", pytest.param("folded", marks=pytest.mark.nightly)])
def test_norms_that_sum_add_what_adapters_add(world, monkeypatch, backend):
    pairs = pairs_of(world)
    expected = [world.answer(name, prompt, 3) for name, prompt in pairs]
    monkeypatch.setattr(LinearBase, "pack", lambda self: None)  # folding finds no weight then

    def work(tp):
        engine = world.engine(max_loras=3, max_cpu_loras=6, punica_backend=backend)
        return serve(engine, world, pairs, 3), rests(engine.runner.model), tp.with_adapters

    for answers, left, with_adapters in engines_in_lockstep(monkeypatch, 2, work):
        assert answers == expected and left == [None] * len(left)
        assert with_adapters > 0


def test_biases_of_adapters_are_added_once(tmp_path_factory, monkeypatch):
    with_biases = AdapterSet(tmp_path_factory.mktemp("biases"), "llama-llama3-rope", LINEARS)

    assert_shared_engines_answer(
        monkeypatch,
        with_biases,
        2,
        pairs_of(with_biases),
        max_loras=3,
        max_cpu_loras=6,
        bias_enabled=True,
    )


def test_what_a_step_left_that_ended_before_its_norm_is_gone_with_the_next_sum():
    def work(tp):
        linear, norm = RowParallelLinear(8, 16, False, torch.float64, tp=tp), RMSNorm(16, dtype=torch.float64)
        linear.__dict__["read_by"] = norm
        linear.weight.copy_(torch.arange(64.0).view(16, 4) + tp.rank)
        few, many = torch.ones(1, 4, dtype=torch.float64), torch.ones(MOST_ROWS + 1, 4, dtype=torch.float64)
        term, _ = linear(few)
        assert norm.rest is not None and torch.equal(term, linear.weight.sum(1)[None])
        total, _ = linear(many)
        return norm.rest, total

    for rest, total in lockstep.in_lockstep(2, work):
        assert rest is None and torch.equal(total[0], 2 * torch.arange(64.0).view(16, 4).double().sum(1) + 4)


def test_a_process_alone_touches_no_norm():
    linear, norm = RowParallelLinear(4, 16, False, torch.float32), RMSNorm(16)
    linear.__dict__["read_by"] = norm
    linear.weight.copy_(torch.arange(64.0).view(16, 4))
    norm.rest = rest = object()  # an adapter's

    y, _ = linear(torch.ones(1, 4))

    assert linear.tp is ONE_RANK and norm.rest is rest and torch.equal(y[0], linear.weight.sum(1))
