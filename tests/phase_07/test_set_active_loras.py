"""What the runner asks of the adapter manager before a forward pass (lab 7.2)."""

import numpy as np
import pytest
from hand_made_steps import lora, make_output, make_request
from tiny_engine import tiny_world

from minivllm.worker.input_batch import InputBatch
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

lab = pytest.mark.lab("7.2")


class RecordingManager:
    """Stands in for the worker's adapter manager."""

    def __init__(self):
        self.calls = []

    def set_active_adapters(self, requests, mapping):
        self.calls.append((set(requests), mapping))


@pytest.fixture
def runner():
    runner = LoRAModelRunnerMixin()
    runner.lora_manager = RecordingManager()
    return runner


def batch_of(scheduled, idle=()):
    return InputBatch.from_scheduler_output(make_output(*scheduled, idle=idle))


@lab
def test_adapters_and_mapping_go_to_the_manager_in_one_call_as_ids(runner):
    decode, prompt = make_request("d", [1, 2], lora(40)), make_request("p", [1, 2, 3])
    batch = batch_of([(decode, 2), (prompt, 2)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

    [(requests, mapping)] = runner.lora_manager.calls
    assert requests == {lora(40)}
    assert mapping.index_mapping == (0, 0, 40, 40)
    assert mapping.prompt_mapping == (40,)


@lab
def test_without_word_on_sampling_every_row_samples_once(runner):
    batch = batch_of([(make_request("a", [1, 2], lora(3)), 1), (make_request("b", [1, 2]), 2)])

    runner.set_active_loras(batch, np.array([2, 1]))

    [(_, mapping)] = runner.lora_manager.calls
    assert mapping.prompt_mapping == (0, 3)


@lab
def test_rows_past_the_batch_are_base_rows(runner):
    batch = batch_of([(make_request("a", [1], lora(3)), 1), (make_request("b", [1], lora(5)), 1)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens, pad_to=4)

    [(_, mapping)] = runner.lora_manager.calls
    assert mapping.index_mapping == (3, 5, 0, 0)
    assert mapping.prompt_mapping == (3, 5, 0, 0)


@lab
def test_a_batch_without_adapters_tells_the_manager_so(runner):
    """Else the backend would go on with the last step's rows."""
    batch = batch_of([(make_request("a", [1, 2]), 2)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

    [(requests, mapping)] = runner.lora_manager.calls
    assert requests == set()
    assert mapping.index_mapping == (0, 0)


@lab
def test_an_engine_without_lora_says_how_to_switch_it_on():
    runner = LoRAModelRunnerMixin()
    batch = batch_of([(make_request("a", [1, 2], lora(1)), 2)])

    with pytest.raises(RuntimeError, match="enable_lora=True"):
        runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)


class TestWithAModel:
    """The slots as they are after the step's evictions are those the backend must use."""

    @pytest.fixture
    def world(self, tmp_path_factory):
        return tiny_world(tmp_path_factory)

    def activate(self, runner, world, *names, idle=()):
        requests = [make_request(name, [1, 2, 3], world.request(name)) for name in names]
        waiting = [make_request(name, [1, 2, 3], world.request(name)) for name in idle]
        batch = batch_of([(request, 3) for request in requests], waiting)
        runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)
        return runner.lora_manager.manager

    @lab
    def test_ids_are_translated_after_the_adapters_are_in_their_slots(self, world):
        runner = world.engine(max_loras=2).runner
        self.activate(runner, world, "qv", "all")

        manager = self.activate(runner, world, "mlp", "patterns")

        slot_of = manager.list_active_adapters()
        assert manager.punica_wrapper.token_lora_indices.tolist() == [slot_of[3]] * 3 + [slot_of[4]] * 3
        assert sorted(slot_of) == [3, 4]

    @lab
    def test_the_same_batch_after_an_eviction_is_translated_anew(self, world):
        runner = world.engine(max_loras=2).runner
        self.activate(runner, world, "qv")
        self.activate(runner, world, "all", "mlp")

        manager = self.activate(runner, world, "qv")

        slot = manager.lora_index_to_id.index(1)
        assert manager.punica_wrapper.token_lora_indices.tolist() == [slot] * 3

    @lab
    def test_the_adapter_of_a_running_request_without_tokens_is_not_evicted(self, world):
        runner = world.engine(max_loras=2).runner
        self.activate(runner, world, "qv", "all")

        manager = self.activate(runner, world, "mlp", idle=["qv"])

        assert set(manager.lora_index_to_id) == {1, 3}

    @lab
    def test_base_rows_after_adapter_rows_use_no_slot(self, world):
        runner = world.engine(max_loras=2).runner
        self.activate(runner, world, "qv", "all")
        batch = batch_of([(make_request("base", [1, 2]), 2)])

        runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

        punica = runner.lora_manager.manager.punica_wrapper
        assert punica.token_lora_indices.tolist() == [-1, -1]
        assert punica.no_lora
