"""Decisions do not depend on who listens: without counters, log and trace, steps, slots and tokens are the same."""

import random

import pytest

from tests.worlds.engines import greedy, tokens_of
from tests.worlds.small import SmallWorld, write_adapter


def history(world, seed, listens):
    """A random history of requests, loads, reloads, unloads and pins: what every step and call came to."""
    rng = random.Random(seed)
    engine = world.engine(max_lora_wait_steps=2, max_num_seqs=4, num_kv_blocks=14)
    if not listens:
        engine.adapters.manager.listeners.clear()
        engine.listeners.clear()
    told, schedule = [], engine.scheduler.schedule

    def scheduled():
        output = schedule()
        rows = [(row.request.request_id, row.num_new_tokens) for row in output.scheduled]
        told.append(("step", rows, list(output.preempted), [r.request_id for r in output.refused]))
        return output

    engine.scheduler.schedule = scheduled
    for number in range(120):
        adapter_id = rng.randint(1, 6)
        call = rng.choice(
            ["add", "add", "add", "step", "step", "load", "reload", "unload", "pin", "unpin", "abort"]
        )
        told.append((call, outcome(world, engine, rng, call, number, adapter_id)))
    engine.adapters.unpin_lora(1)
    while engine.has_unfinished_requests():
        told.append(answers(engine.step()))
        told.append(list(engine.adapters.manager.lora_index_to_id))
    return told


def outcome(world, engine, rng, call, number, adapter_id):
    """What a call gives, or its error in words, and the slots after it."""
    if call == "reload":
        write_adapter(world.folder / f"adapter{adapter_id}", seed=number)
    calls = {
        "add": lambda: engine.add_request(
            f"r{number}", [5, 6, 7], greedy(rng.randint(1, 9)), lora_request=world.request(adapter_id % 6)
        ),
        "step": lambda: answers(engine.step()),
        "load": lambda: engine.add_lora(world.request(adapter_id)),
        "reload": lambda: engine.add_lora(world.request(adapter_id, load_inplace=True)),
        "unload": lambda: engine.remove_lora(adapter_id),
        "pin": lambda: adapter_id == 1 and engine.pin_lora(adapter_id),
        "unpin": lambda: engine.unpin_lora(adapter_id),
        "abort": lambda: engine.abort_request(f"r{number - 3}"),
    }
    try:
        found = calls[call]()
    except (ValueError, RuntimeError) as error:
        found = str(error)
    return found, list(engine.adapters.manager.lora_index_to_id), sorted(engine.list_loras())


def answers(outputs):
    return [(output.request_id, tokens_of(output), output.error) for output in outputs]


@pytest.mark.parametrize("seed", range(2))
def test_a_recorder_that_records_nothing_changes_nothing(tmp_path, seed):
    told = []
    for listens in (True, False):
        (tmp_path / str(listens)).mkdir()
        told.append(history(SmallWorld(tmp_path / str(listens)), seed, listens))

    with_listeners, without = told

    assert [anonymous(entry, tmp_path) for entry in without] == [
        anonymous(entry, tmp_path) for entry in with_listeners
    ]
    assert sum(entry[0] == "step" and bool(entry[1]) for entry in without) > 30, "little happened"


def anonymous(entry, folder):
    """The two engines read from folders of different names."""
    return repr(entry).replace(str(folder / "True"), "").replace(str(folder / "False"), "")
