"""Requests that ask for a version: who goes on with which, when, and what ends the wait."""

import pytest

from minivllm.lora.request import AtLeast
from tests.worlds.hunts import run
from tests.worlds.versioned import VersionedWorld

pytestmark = pytest.mark.lab("13.1")


@pytest.fixture
def world(tmp_path):
    return VersionedWorld(tmp_path)


@pytest.fixture
def engine(world):
    """One whose adapter is there, at version 0."""
    made = world.engine()
    made.add_lora(world.policy())
    return made


def steps(engine, count):
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize(("asked", "updates", "has"), [(1, [1], 1), (2, [1, 2], 2), (2, [5], 5)], ids=str)
def test_a_request_goes_on_with_the_version_that_it_asked_for_or_a_later_one(
    world, engine, asked, updates, has
):
    world.ask_for(engine, "waits", AtLeast("policy", asked))
    steps(engine, 2)

    for version in updates:
        assert not engine.scheduler.requests["waits"].output_token_ids, (
            "it began before its version was there"
        )
        world.update(engine, version, version=version)
        steps(engine, 2)
    output = run(engine)["waits"]

    assert output.lora_version == has
    world.check(output, [has] * 6)


def test_others_pass_and_it_keeps_its_place_before_those_who_came_later(world):
    engine = world.engine(max_num_seqs=1)
    engine.add_lora(world.policy())
    world.ask_for(engine, "waits", AtLeast("policy", 1), tokens=2)
    world.ask_for(engine, "passes", None, tokens=4)
    world.ask_for(engine, "came later", None, tokens=2)
    steps(engine, 2)
    assert engine.scheduler.requests["passes"].output_token_ids, "a request that waits holds up another one"
    world.update(engine, 1)

    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]

    assert ended == ["passes", "waits", "came later"]


def test_all_answers_of_one_request_go_on(world, engine):
    world.ask_for(engine, "three", AtLeast("policy", 1), n=3, temperature=1.0, seed=5)
    engine.step()
    world.update(engine, 1)

    output = run(engine)["three"]

    assert output.error is None and output.lora_version == 1
    assert [len(answer.token_ids) for answer in output.outputs] == [6, 6, 6]


def test_afterwards_nothing_is_left_of_the_wait(world, engine):
    world.ask_for(engine, "waits", AtLeast("policy", 1))
    engine.step()
    world.update(engine, 1)
    run(engine)

    assert [record.request.version for record in engine.adapters.adapters.values()] == [1]
    assert not engine.scheduler.in_flight and not engine.adapters._until


def test_it_fails_by_name_when_its_time_is_over_and_not_before(world, engine):
    now = 100.0
    engine.adapters.clock = lambda: now
    world.update(engine, 1)
    world.ask_for(engine, "waits", AtLeast("policy", 3, seconds=5))
    steps(engine, 2)
    now = 104.9
    assert engine.step() == [] and engine.has_unfinished_requests(), "there is a tenth of a second left"
    now = 105.0

    output = run(engine, 5)["waits"]

    assert output.error is not None and output.outputs[0].token_ids == []
    for word in ("policy", "3", "1", "5"):
        assert word in output.error, f"it does not say {word}"
    assert output.outputs[0].finish_reason == "error"
    assert len(engine.adapters.adapters) == 1, "a record of the wait is left"


def test_a_version_that_comes_before_anybody_has_noticed_that_time_is_over_will_do(world, engine):
    now = 100.0
    engine.adapters.clock = lambda: now
    world.ask_for(engine, "waits", AtLeast("policy", 1, seconds=5))
    engine.step()
    now = 200.0
    world.update(engine, 1)

    output = run(engine)["waits"]

    world.check(output, [1] * 6)


@pytest.mark.parametrize("used", [False, True], ids=["nobody uses it", "in use"])
def test_an_unload_ends_the_wait_at_once(world, engine, used):
    if used:
        world.ask_for(engine, "runs", world.policy(), tokens=12)
    engine.add_lora(world.adapter(1))  # its id is nobody's name
    world.ask_for(engine, "waits", AtLeast("policy", 1, seconds=3600))
    engine.step()
    [wait] = engine.adapters._until
    engine.remove_lora(7)

    ended = {}
    for _ in range(3):
        ended |= {output.request_id: output for output in engine.step() if output.finished}

    assert "waits" in ended, "it waits for a version that nobody will bring"
    assert f"adapter 'policy' (id {wait}) is being unloaded" in ended["waits"].error
    run(engine)
    assert list(engine.adapters.adapters) == [1]


def test_a_reload_that_fails_brings_no_version(world, engine):
    """It counts from its order on. The request goes on waiting, and gets the update that comes later."""
    world.ask_for(engine, "runs", world.policy(), tokens=5)
    engine.step()
    world.ask_for(engine, "waits", AtLeast("policy", 1))
    engine.add_lora(world.policy(load_inplace=True, lora_path=str(world.folder_of(8))))
    (world.folder_of(8) / "adapter_model.safetensors").write_bytes(b"torn")  # before it is read
    while "runs" in engine.scheduler.requests:
        engine.step()
    steps(engine, 2)
    assert "waits" in engine.scheduler.requests, "it failed with a reload that it had nothing to do with"

    world.update(engine, 1)

    world.check(run(engine)["waits"], [1] * 6)


def test_a_reload_that_is_done_is_a_version_and_the_next_one_waits_for_who_has_it(world, engine):
    world.ask_for(engine, "runs", world.policy(), tokens=3)
    engine.step()
    world.ask_for(engine, "waits", AtLeast("policy", 1), tokens=12)
    engine.add_lora(world.policy(load_inplace=True, lora_path=str(world.folder_of(1))))
    while not (waits := engine.scheduler.requests["waits"]).output_token_ids:
        engine.step()

    assert waits.adapter_generation == engine.adapters.adapters[7].generation, (
        "a generation of a reload before"
    )
    world.ask_for(engine, "after", world.policy(load_inplace=True, lora_path=str(world.folder_of(2))))
    outputs = run(engine)
    world.check(outputs["waits"], [1] * 12)
    world.check(outputs["after"], [2] * 6)
