"""The loop of examples/policy_gradient.py, on a tiny model: the reward rises, and logprobs are those of PEFT."""

import torch

from examples.policy_gradient import learn, picture
from tests.worlds.models import character_tokenizer, save_base


def share_of_early_letters(answer):
    return sum(letter in "abcdefghijklm" for letter in answer) / max(len(answer), 1)


def test_the_reward_rises_and_each_round_samples_from_the_newest_weights(tmp_path):
    save_base(tmp_path / "base", "llama-llama3-rope", torch.float32)
    character_tokenizer().save_pretrained(tmp_path / "base")

    history = learn(tmp_path / "base", "How old?", share_of_early_letters, rounds=20, learning_rate=3e-2)
    picture([history], tmp_path / "rewards.png")

    rewards = [each.reward for each in history]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert max(each.off for each in history) < 1e-4
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
