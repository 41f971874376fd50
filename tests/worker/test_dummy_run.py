"""Warm-up: a pass over all slots, on adapters of zeros."""

import numpy as np
import pytest
import torch

from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from minivllm.worker.model_runner import ModelRunner
from tests.worlds.small import SmallWorld


@pytest.fixture
def runner(tmp_path):
    """By itself, not an engine's."""
    return ModelRunner(SmallWorld(tmp_path).engine().config)


def dummy_run(runner, tokens, sampled, **options):
    return runner.maybe_dummy_run_with_lora(
        runner.config.lora_config, np.array(tokens), np.array(sampled), **options
    )


def test_adapters_take_turns_on_the_rows_until_every_slot_is_in_use(runner):
    manager = runner.lora_manager.manager
    slots = manager.lora_slots

    with dummy_run(runner, [2] * (slots + 1), [1] * (slots + 1)):
        table = manager.lora_index_to_id
        tokens = [table[slot] for slot in manager.punica_wrapper.token_lora_indices.tolist()]
        samples = [table[slot] for slot in manager.punica_wrapper.sampler_indices.tolist()]

    turns = [i % slots + 1 for i in range(slots + 1)]
    assert sorted(table) == list(range(1, slots + 1))
    assert tokens == [i for i in turns for _ in range(2)]
    assert samples == turns


def test_they_have_weights_for_everything_and_change_nothing(runner):
    manager = runner.lora_manager.manager

    with dummy_run(runner, [1], [1]):
        live = [ranks for layer in manager.modules.values() for ranks in layer.slots.live_ranks]
        values = [t for layer in manager.modules.values() for t in (*layer.slots.a, *layer.slots.b)]

    assert all(min(ranks) > 0 for ranks in live), "a pass would skip what costs time later"
    assert not any(torch.count_nonzero(t) for t in values)


@pytest.mark.parametrize("remove_lora", [True, False])
def test_they_are_gone_afterwards_unless_they_are_to_stay(runner, remove_lora):
    with dummy_run(runner, [1], [1], remove_lora=remove_lora):
        known = runner.list_loras()

    slots = runner.lora_manager.manager.lora_slots
    assert known == set(range(1, slots + 1))
    assert runner.list_loras() == (set() if remove_lora else known)
    assert len(runner.lora_manager.manager.get_free_slots()) == (slots if remove_lora else 0)


def test_a_pass_that_fails_leaves_whoever_listens_listening(runner):
    manager = runner.lora_manager.manager
    listeners = list(manager.listeners)

    with pytest.raises(RuntimeError, match="no such kernel"), dummy_run(runner, [1], [1]):
        raise RuntimeError("no such kernel")

    assert listeners
    assert manager.listeners == listeners


def test_without_lora_there_is_nothing_to_set_up():
    runner = LoRAModelRunnerMixin()

    with runner.maybe_dummy_run_with_lora(None, np.array([1]), np.array([1])):
        pass
