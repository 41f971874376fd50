"""The loss of stale answers: its gradient, by arithmetic, by enumeration of all answers, and by differences."""

import math

import pytest
import torch

from minivllm.versions.policy_loss import policy_loss

pytestmark = pytest.mark.lab("13.4")

NAN = math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(new, sampled, advantages, **options):
    """Of the loss, by the logprobs."""
    new = new.clone().requires_grad_()
    policy_loss(new, sampled, advantages, **options).backward()
    return new.grad


def test_on_paper_ten_answers_of_version_0_count_as_ten_of_the_new_one():
    """8 say yes (0.8 then, 0.5 now) with advantage 0, and 2 say no (0.2 then, 0.5 now) with advantage 1."""
    sampled = torch.tensor([[0.8]] * 8 + [[0.2]] * 2, dtype=torch.float64).log()
    new, advantages = torch.full((10, 1), 0.5, dtype=torch.float64).log(), tensor(*[0.0] * 8, *[1.0] * 2)

    found = gradient(new, sampled, advantages, most=10.0)

    assert torch.allclose(found[:8], tensor([0.0]))
    assert torch.allclose(found[8:], tensor([-2.5 / 10])), (
        "each of the two counts 0.5 / 0.2 times, of ten tokens"
    )
    assert policy_loss(new, sampled, advantages, most=10.0).item() == pytest.approx(
        -2 * 2.5 * math.log(0.5) / 10
    )


def test_of_fresh_answers_it_is_minus_the_mean_of_advantages():
    logprobs = tensor([-1.0, -2.0], [-0.5, -3.0])

    found = gradient(logprobs, logprobs.clone(), tensor(3.0, -1.0))

    assert torch.allclose(found, tensor([-0.75, -0.75], [0.25, 0.25]))


def test_the_gradient_is_that_of_the_expected_advantage_although_another_version_sampled():
    """All answers of one token, each as often as the old version gives it: the sum is exact, without any chance."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    (right,) = torch.autograd.grad(-(scores.softmax(0) * advantages).sum(), scores)

    new = scores.log_softmax(0)
    losses = torch.stack(
        [policy_loss(new[i].view(1, 1), old[i].view(1, 1), advantages[i : i + 1], most=1e9) for i in range(6)]
    )
    (found,) = torch.autograd.grad((losses * old.exp()).sum(), scores)

    assert torch.allclose(found, right, atol=1e-12), f"{found.tolist()} is not {right.tolist()}"


@pytest.mark.parametrize("most", [0.5, 1.0, 2.0, 3.5])
def test_each_token_has_its_weight_up_to_the_limit(most):
    generator = torch.Generator().manual_seed(5)
    new = torch.randn(5, 7, generator=generator, dtype=torch.float64) - 2
    sampled = torch.randn(5, 7, generator=generator, dtype=torch.float64) - 2
    lengths, advantages = [7, 3, 1, 5, 0], torch.randn(5, generator=generator, dtype=torch.float64)
    expected = torch.zeros(5, 7, dtype=torch.float64)
    loss = 0.0
    for row, length in enumerate(lengths):
        sampled[row, length:] = NAN
        for i in range(length):
            weight = min(math.exp(new[row, i].item() - sampled[row, i].item()), most)
            expected[row, i] = -weight * advantages[row].item() / sum(lengths)
            loss += expected[row, i].item() * new[row, i].item()

    found = gradient(new, sampled, advantages, most=most)

    assert torch.allclose(found, expected, atol=1e-14)
    assert policy_loss(new, sampled, advantages, most=most).item() == pytest.approx(loss)


def test_the_limit_is_2_unless_told_otherwise():
    found = gradient(tensor([0.0]).log_softmax(0).view(1, 1), tensor([-9.0]).view(1, 1), tensor(1.0))

    assert found.item() == -2.0


@pytest.mark.parametrize("behind", [NAN, -math.inf, math.inf, 0.0, 1e30])
def test_places_behind_an_answers_end_are_nothing_whatever_is_there(behind):
    new = tensor([-1.0, -2.0, -3.0], [-1.5, behind, behind])
    sampled = tensor([-1.1, -1.9, -3.0], [-1.5, NAN, NAN])

    found = gradient(new, sampled, tensor(1.0, -2.0))

    assert found.isfinite().all(), f"{found.tolist()} is not finite"
    assert found[1, 1:].tolist() == [0.0, 0.0]
    assert torch.allclose(found[0], tensor(-1.0, -1.0, -1.0) * (new[0] - sampled[0]).exp() / 4)


def test_a_long_answer_weighs_more_than_a_short_one():
    new = tensor([-1.0, -1.0, -1.0], [-1.0, NAN, NAN])

    found = gradient(new, new.clone(), tensor(1.0, 1.0))

    assert torch.allclose(found, tensor([-0.25] * 3, [-0.25, 0.0, 0.0]))


def test_without_a_token_it_is_0_and_can_be_differentiated():
    new, sampled = torch.zeros(2, 3, dtype=torch.float64), torch.full((2, 3), NAN, dtype=torch.float64)

    assert policy_loss(new, sampled, tensor(1.0, 2.0)).item() == 0.0
    assert gradient(new, sampled, tensor(1.0, 2.0)).abs().max() == 0


def test_it_is_one_number_and_changes_no_argument():
    new, sampled, advantages = tensor([-1.0, -2.0]), tensor([-3.0, NAN]), tensor(1.5)
    copies = new.clone(), sampled.clone(), advantages.clone()

    loss = policy_loss(new, sampled, advantages)

    assert loss.shape == ()
    for now, before in zip((new, sampled, advantages), copies):
        assert torch.equal(now.nan_to_num(7), before.nan_to_num(7))
