"""Norms that are left with the sum over processes, where these can: a model's answers are those of transformers and
PEFT. Threads play the processes, and plain arithmetic the kernel.
"""

import pytest
import torch
import torch.nn.functional as F
from test_shared_adapters import LINEARS

from minivllm.gpu.fused import fuse
from minivllm.gpu.fused.blocks import AddAndNorm, Pending
from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.layers.linear import RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import ONE_RANK
from minivllm.models.registry import get_model
from tests.oracles.peft import reference_logits
from tests.worlds import ranks
from tests.worlds.engines import TinyWorld
from tests.worlds.models import VARIANTS, PagedRequests, token_ids, transformers_model
from tests.worlds.ranks import assert_shared_engines_answer, engines_in_lockstep, serve

MOST_ROWS = 8  # more are summed before
PLAIN = {name: {**config, "lora_bias": False} for name, config in LINEARS.items()}


class ThreadThatNorms(ranks.ThreadOfMany):
    """Its norms sum few rows. `normed`: how many norms did; `with_adapters`: how many that added adapters, too."""

    normed = with_adapters = 0

    def add_and_norm(self, x, residual, weight, eps):
        if len(x) > MOST_ROWS:
            return None
        self.normed += 1
        residual += self.all_reduce(x)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def add_adapters_and_norm(self, update, slots, x, residual, weight, eps):
        """Stands for `peer_norm` with an update."""
        if len(x) > MOST_ROWS:
            return None
        self.with_adapters += 1
        h = self.all_reduce(update.h)
        return adapted_norm(update._replace(h=h), slots, weight, eps, self.all_reduce(x), residual)


@pytest.fixture(autouse=True)
def threads_can(monkeypatch):
    monkeypatch.setattr("tests.worlds.ranks.ThreadOfMany", ThreadThatNorms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_has_the_logits_of_transformers_in_steps_of_few_rows_and_of_many(variant, tmp_path):
    texts, steps = [token_ids(n, seed=n) for n in (9, 1, 14)], [[(0, 5), (1, 1)], [(0, 4), (2, 9)], [(2, 5)]]
    transformers_model(variant).save_pretrained(tmp_path)
    expected = [reference_logits(transformers_model(variant), text, torch.float64) for text in texts]

    def work(tp):
        model = fuse(get_model(tmp_path, torch.float64, tp=tp))
        return PagedRequests(model, texts).run(steps), tp.normed

    for logits, count in ranks.in_lockstep(2, work):
        for found, reference in zip(logits, expected, strict=True):
            assert torch.allclose(found, reference, rtol=1e-9, atol=1e-9)
        # Of two layers' attention always, in the two steps that are not too large; of dense MLPs, too.
        assert count in (4, 6, 8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return TinyWorld(tmp_path_factory.mktemp("plain"), "llama-llama3-rope", PLAIN)


@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
def test_adapters_are_in_the_terms_that_norms_sum(world, monkeypatch, fully):
    pairs = world.workload(rows=2)
    expected = [world.answer(name, prompt, 4) for name, prompt in pairs]

    def work(tp):
        engine = world.engine(max_loras=3, max_cpu_loras=6, fully_sharded_loras=fully)
        fuse(engine.runner.model)
        return serve(engine, world, pairs, 4), tp.normed

    for answers, count in engines_in_lockstep(monkeypatch, 2, work):
        assert answers == expected and count > 0


def test_norms_that_sum_add_what_adapters_add(world, monkeypatch):
    pairs = world.workload(rows=2)
    expected = [world.answer(name, prompt, 3) for name, prompt in pairs]

    def work(tp):
        engine = world.engine(max_loras=3, max_cpu_loras=6, punica_backend="paged")
        return serve(engine, world, pairs, 3), tp.with_adapters

    for answers, with_adapters in engines_in_lockstep(monkeypatch, 2, work):
        assert answers == expected and with_adapters > 0


def test_biases_of_adapters_are_added_once(tmp_path_factory, monkeypatch):
    with_biases = TinyWorld(tmp_path_factory.mktemp("biases"), "llama-llama3-rope", LINEARS)

    assert_shared_engines_answer(
        monkeypatch,
        with_biases,
        2,
        with_biases.workload(rows=2),
        max_loras=3,
        max_cpu_loras=6,
        bias_enabled=True,
    )


def test_few_rows_are_summed_by_the_norm_and_many_before_it():
    def work(tp):
        linear, norm = RowParallelLinear(8, 16, False, torch.float64, tp=tp), RMSNorm(16, dtype=torch.float64)
        linear.weight.copy_(torch.arange(64.0).view(16, 4) + tp.rank)
        add_and_norm, sums = AddAndNorm(tp), []
        for rows in (1, MOST_ROWS + 1):
            term, _ = linear(torch.ones(rows, 4, dtype=torch.float64))
            residual = torch.zeros(rows, 16, dtype=torch.float64)
            normed = add_and_norm(Pending(term, is_term=True), residual, norm)
            sums.append((residual, normed, tp.normed))
        return sums

    total = 2 * torch.arange(64.0).view(16, 4).double().sum(1) + 4
    expected = F.rms_norm(total, (16,), eps=1e-6)
    for sums in ranks.in_lockstep(2, work):
        for residual, normed, count in sums:
            assert count == 1 and torch.equal(residual, total.expand_as(residual))
            torch.testing.assert_close(normed, expected.expand_as(normed))


def test_a_process_alone_sums_nothing():
    linear, norm = RowParallelLinear(4, 16, False, torch.float32), RMSNorm(16)
    linear.weight.copy_(torch.arange(64.0).view(16, 4))
    residual = torch.zeros(1, 16)

    y, _ = linear(torch.ones(1, 4))
    AddAndNorm(linear.tp)(Pending(y, is_term=True), residual, norm)

    assert linear.tp is ONE_RANK and torch.equal(residual[0], linear.weight.sum(1))
