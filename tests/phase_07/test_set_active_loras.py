"""What the runner asks of the adapter manager before a forward pass (lab 7.2)."""

from copy import copy

import numpy as np
import pytest
from hand_made_steps import lora, make_output, make_request

from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.worker.input_batch import InputBatch
from tests.oracles.rows import assert_rows_equal
from tests.worlds.small import SmallWorld

lab = pytest.mark.lab("7.2")


class RecordingManager(LRUCacheWorkerLoRAManager):
    """A worker's adapter manager that makes nothing active, and notes what it was asked for."""

    def __init__(self, real):
        vars(self).update(vars(real))
        self.calls = []

    def set_active_adapters(self, requests, mapping):
        self.calls.append((set(requests), mapping))

    def only_call(self):
        """The adapters and the mapping of the one call that a step makes."""
        assert len(self.calls) == 1, f"set_active_adapters was called {len(self.calls)} times, not once"
        return self.calls[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return SmallWorld(tmp_path_factory.mktemp("model")).engine()


@pytest.fixture
def runner(engine):
    runner = copy(engine.runner)
    runner.worker_manager = RecordingManager(runner.worker_manager)
    return runner


def batch_of(scheduled, idle=()):
    return InputBatch.from_scheduler_output(make_output(*scheduled, idle=idle))


@lab
def test_adapters_and_mapping_go_to_the_manager_in_one_call_as_ids(runner):
    decode, prompt = make_request("d", [1, 2], lora(40)), make_request("p", [1, 2, 3])
    batch = batch_of([(decode, 2), (prompt, 2)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

    requests, mapping = runner.lora_manager.only_call()
    assert requests == {lora(40)}
    assert mapping.index_mapping == (0, 0, 40, 40), "one id a token: base computes 2, adapter 40 computes 2"
    assert mapping.prompt_mapping == (40,), "only the row of adapter 40 samples"


@lab
def test_without_word_on_sampling_every_row_samples_once(runner):
    batch = batch_of([(make_request("a", [1, 2], lora(3)), 1), (make_request("b", [1, 2]), 2)])

    runner.set_active_loras(batch, np.array([2, 1]))

    _, mapping = runner.lora_manager.only_call()
    assert mapping.prompt_mapping == (0, 3), "one id a row"


@lab
def test_the_counts_are_those_of_the_call_and_stay_as_they_are(runner):
    """A captured graph has counts of its own for a batch: how many tokens the batch says is not asked."""
    batch = batch_of([(make_request("a", [1, 2], lora(3)), 1), (make_request("b", [1, 2]), 2)])
    counts = np.array([0, 4])

    runner.set_active_loras(batch, counts)

    _, mapping = runner.lora_manager.only_call()
    assert mapping.index_mapping == (3, 3, 3, 3), "0 tokens of base and 4 of adapter 3"
    assert mapping.prompt_mapping == (0, 3), "every row samples one, also one without tokens"
    assert counts.tolist() == [0, 4], "the caller's array was written to"


@lab
def test_a_step_in_which_nobody_samples_says_so(runner):
    batch = batch_of([(make_request("a", [1, 2, 3], lora(3)), 2), (make_request("b", [1, 2, 3]), 1)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

    _, mapping = runner.lora_manager.only_call()
    assert mapping.prompt_mapping == (), "two chunks, of which neither samples"
    assert mapping.index_mapping == (0, 3, 3)


@lab
def test_the_manager_hears_of_every_step_though_it_is_like_the_last(runner):
    """Adapters may have come and gone in between; who knows what is in its slot is the manager."""
    batch = batch_of([(make_request("a", [1, 2], lora(3)), 1)])

    for _ in range(2):
        runner.set_active_loras(batch, np.array([1]), np.array([1]))

    assert len(runner.lora_manager.calls) == 2
    assert all(mapping.is_prefill is True for _, mapping in runner.lora_manager.calls), "as in vLLM"


@lab
def test_a_batch_without_adapters_tells_the_manager_so(runner):
    """Else the backend would go on with the last step's rows."""
    batch = batch_of([(make_request("a", [1, 2]), 2)])

    runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)

    requests, mapping = runner.lora_manager.only_call()
    assert requests == set()
    assert mapping.index_mapping == (0, 0)


@lab
@pytest.mark.parametrize("lora_request", [lora(1), None], ids=["an adapter", "base rows"])
def test_an_engine_without_lora_says_how_to_switch_it_on(tmp_path, lora_request):
    runner = SmallWorld(tmp_path).engine(enable_lora=False).runner
    batch = batch_of([(make_request("a", [1, 2], lora_request), 2)])

    with pytest.raises(RuntimeError, match="enable_lora=True"):
        try:
            runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)
        except AttributeError as error:
            pytest.fail(
                f"LoRA is off, so there is no worker manager, and `_manager` says so; instead: {error}"
            )
        pytest.fail("LoRA is off: a RuntimeError was expected, and nothing was raised")


class TestWithAModel:
    """The slots as they are after the step's evictions are those the backend must use."""

    @pytest.fixture
    def world(self, tmp_path):
        return SmallWorld(tmp_path)

    def activate(self, runner, world, *adapter_ids, idle=()):
        """One step of 3 tokens for each; what the backend knows after it."""
        requests = [make_request(f"r{a}", [1, 2, 3], world.request(a)) for a in adapter_ids]
        waiting = [make_request(f"idle{a}", [1, 2, 3], world.request(a)) for a in idle]
        batch = batch_of([(request, 3) for request in requests], waiting)
        runner.set_active_loras(batch, batch.num_scheduled_tokens, batch.num_sampled_tokens)
        return runner.lora_manager.manager

    def assert_tokens_are_of(self, manager, *adapter_ids):
        """3 tokens each; which slot an adapter has is read from the table."""
        table = manager.lora_index_to_id
        slots = [table.index(a) if a else -1 for a in adapter_ids for _ in range(3)]
        assert_rows_equal(
            manager.punica_wrapper.token_lora_indices,
            slots,
            labels=[
                f"a token of adapter {a}" if a else "a base token" for a in adapter_ids for _ in range(3)
            ],
            what=f"slots of tokens, with the slot table {table}",
        )

    @lab
    def test_ids_are_translated_after_the_adapters_are_in_their_slots(self, world):
        runner = world.engine().runner
        self.activate(runner, world, 1, 2)

        manager = self.activate(runner, world, 3, 4)

        assert sorted(manager.list_active_adapters()) == [3, 4]
        self.assert_tokens_are_of(manager, 3, 4)

    @lab
    def test_the_same_batch_after_an_eviction_is_translated_anew(self, world):
        runner = world.engine().runner
        self.activate(runner, world, 1)
        self.activate(runner, world, 2, 3)

        manager = self.activate(runner, world, 1)

        self.assert_tokens_are_of(manager, 1)

    @lab
    def test_the_adapter_of_a_running_request_without_tokens_is_not_evicted(self, world):
        runner = world.engine().runner
        self.activate(runner, world, 1, 2)

        manager = self.activate(runner, world, 3, idle=[1])

        assert set(manager.lora_index_to_id) == {1, 3}

    @lab
    def test_base_rows_after_adapter_rows_use_no_slot(self, world):
        runner = world.engine().runner
        self.activate(runner, world, 1, 2)

        manager = self.activate(runner, world, 0)

        self.assert_tokens_are_of(manager, 0)
        assert manager.punica_wrapper.no_lora
