"""A reload that fails leaves the adapter as the last good order had it: folder, names, weights, limits of its prompts.

The bad folders are found out by their numbers alone: their shapes fit, so the order is taken and fails when it is read.
"""

import shutil
from itertools import product

import pytest

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, tiny_world, tokens_of
from tests.worlds.spoiled_adapters import fill
from tests.worlds.tokens import TokenSet, V

PROMPT = [5, 6, 7, 8, 9, 10]
GOOD = ["qv", "all", "mlp", "patterns"]
ID = 9

# How a reload is ordered, and whether a request of the old weights runs meanwhile.
WAYS = [(order, runs) for order in ("add_lora", "request") for runs in (False, True)]
by_way = pytest.mark.parametrize(
    ("order", "runs"), WAYS, ids=[f"{o}-{'waits' if r else 'idle'}" for o, r in WAYS]
)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Name of a good adapter -> a copy of its folder with weights that are no numbers."""
    world, folder = tiny_world(tmp_path_factory), tmp_path_factory.mktemp("bad")
    return {name: spoiled(world.path(name), folder / name) for name in GOOD}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return TokenSet(tmp_path_factory.mktemp("tokens"), "llama-llama3-rope")


def spoiled(source, folder):
    fill(shutil.copytree(source, folder), float("nan"))
    return folder


def policy(step, folder, **changes):
    """As a trainer's next policy comes: the same id, another name and another folder."""
    return LoRARequest(f"policy-{step}", ID, str(folder), **changes)


def order_reload(engine, lora_request, order="request", runs=False, old=None):
    """Order it and see it through; what its request, or `add_lora` where nobody runs, was told."""
    if runs:
        engine.add_request("running", PROMPT, greedy(5), lora_request=old)
        engine.step()
    if order == "add_lora" and not runs:
        with pytest.raises(ValueError) as refused:
            engine.add_lora(lora_request)
        return str(refused.value)
    if order == "add_lora":
        assert engine.add_lora(lora_request) is False, "it waits"
        assert run(engine)["running"].error is None
        return None
    engine.add_request("reload", PROMPT, greedy(4), lora_request=lora_request)
    return run(engine)["reload"].error


def answer(engine, lora_request, count=6):
    engine.add_request("asked", PROMPT, greedy(count), lora_request=lora_request)
    output = run(engine)["asked"]
    assert output.error is None
    return tokens_of(output)


def assert_is_known_as(engine, world, name, step, others):
    """Adapter ID serves this folder under this name, in memory and read again, and none of the `others`."""
    expected = world.oracle().greedy(name, PROMPT, 6)
    for lora_request in others:
        with pytest.raises(ValueError, match=f"lora_int_id {ID} belongs to adapter 'policy-{step}' at"):
            engine.add_request("refused", PROMPT, greedy(2), lora_request=lora_request)
        with pytest.raises(ValueError, match="is unknown"):
            engine.add_request("refused", PROMPT, greedy(2), lora_request=lora_request.lora_name)
    for lora_request in (policy(step, world.path(name)), f"policy-{step}"):
        assert answer(engine, lora_request) == expected
    evict(engine, world)
    assert answer(engine, policy(step, world.path(name))) == expected


def evict(engine, world):
    for i, name in enumerate(GOOD):
        engine.add_lora(LoRARequest(f"other-{name}", 20 + i, str(world.path(name))))
    assert ID not in engine.list_loras()


@by_way
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "evicted"])
def test_the_last_good_folder_is_served_under_its_name_and_the_bad_one_is_refused(
    world, bad, order, runs, in_memory
):
    engine, old = world.engine(), policy(1, world.path("qv"))
    engine.add_lora(old)
    if not in_memory:
        evict(engine, world)

    said = order_reload(engine, policy(2, bad["all"], load_inplace=True), order, runs, old)

    if order == "add_lora" and runs:
        assert said is None  # it answered long ago: nobody is left to tell
    else:
        assert "NaN" in said
    assert_is_known_as(engine, world, "qv", 1, [policy(2, bad["all"])])


@by_way
def test_from_the_same_folder_it_leaves_the_adapter_known_by_all_its_names(world, bad, tmp_path, order, runs):
    folder = shutil.copytree(world.path("qv"), tmp_path / "mine")
    engine, old = world.engine(), policy(1, folder)
    engine.add_lora(old)
    engine.add_lora(LoRARequest("alias", ID, str(folder)))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    shutil.copy(bad["qv"] / "adapter_model.safetensors", folder)

    order_reload(engine, policy(1, folder, load_inplace=True), order, runs, old)
    (folder / "adapter_model.safetensors").write_bytes(weights)

    for name in ("policy-1", "alias"):
        assert answer(engine, name) == world.oracle().greedy("qv", PROMPT, 6)
    evict(engine, world)
    assert answer(engine, "alias") == world.oracle().greedy("qv", PROMPT, 6)


@pytest.mark.parametrize(
    ("which", "aborted"),
    [
        *((which, False) for which in product([True, False], repeat=3)),  # each has a request
        *(
            ((True, False, True), True),
            ((True, True, False), True),
            ((False, False, False), True),
        ),  # the requests are aborted: the reloads still count, with nobody waiting for them
    ],
    ids=str,
)
def test_of_several_in_a_row_the_last_good_one_counts(world, bad, which, aborted):
    """The reloads wait for one request of the old weights; of each the request waits for the one before it."""
    engine = world.engine()
    folders = [world.path("qv")]
    folders += [world.path(name) if good else bad[name] for name, good in zip(GOOD[1:], which)]
    requests = [policy(step, folder) for step, folder in enumerate(folders)]
    engine.add_request("old", PROMPT, greedy(6), lora_request=requests[0])
    engine.step()
    for step, request in enumerate(requests[1:], 1):
        ordered = policy(step, request.lora_path, load_inplace=True)
        engine.add_request(str(step), PROMPT, greedy(6), lora_request=ordered)
    if aborted:
        engine.abort_request(["1", "2", "3"])

    outputs = run(engine)

    assert tokens_of(outputs["old"]) == world.oracle().greedy("qv", PROMPT, 6)
    for step, good in () if aborted else enumerate(which, 1):
        assert (outputs[str(step)].error is None) == good
        expected = world.oracle().greedy(GOOD[step], PROMPT, 6) if good else []
        assert tokens_of(outputs[str(step)]) == expected
    last = max((step for step, good in enumerate(which, 1) if good), default=0)
    assert_is_known_as(engine, world, GOOD[last], last, [r for r in requests if r is not requests[last]])
    assert not engine.adapters.adapters[ID].before, "versions are kept that nobody goes back to"


def test_two_bad_ones_in_a_row_bring_back_the_names_of_before_and_drop_those_given_between(world, bad):
    engine = world.engine()
    engine.add_request("old", PROMPT, greedy(6), lora_request=policy(0, world.path("qv")))
    engine.add_lora(LoRARequest("alias-0", ID, str(world.path("qv"))))
    engine.step()
    engine.add_lora(policy(1, bad["all"], load_inplace=True))
    engine.add_lora(LoRARequest("alias-1", ID, str(bad["all"])))
    engine.add_lora(policy(2, bad["mlp"], load_inplace=True))

    run(engine)

    assert sorted(engine.adapters.by_name) == ["alias-0", "policy-0"]
    assert answer(engine, "alias-0") == world.oracle().greedy("qv", PROMPT, 6)


def test_a_name_that_another_adapter_has_taken_meanwhile_stays_that_ones(world, bad):
    engine, old = world.engine(), policy(1, world.path("qv"))
    engine.add_lora(old)
    engine.add_lora(LoRARequest("alias", ID, old.lora_path))
    engine.add_request("running", PROMPT, greedy(5), lora_request=old)
    engine.step()
    engine.add_lora(policy(2, bad["all"], load_inplace=True))
    engine.add_lora(LoRARequest("policy-1", 10, str(world.path("mlp"))))

    run(engine)

    assert answer(engine, "policy-1") == world.oracle().greedy("mlp", PROMPT, 6)
    assert answer(engine, "alias") == world.oracle().greedy("qv", PROMPT, 6)
    with pytest.raises(ValueError, match="adapter name 'policy-1' belongs to lora_int_id 10"):
        engine.add_request("refused", PROMPT, greedy(2), lora_request=old)


def test_one_that_is_refused_for_lack_of_memory_changes_nothing(world):
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    engine.add_lora(policy(1, world.path("qv")))
    engine.add_request("running", PROMPT, greedy(8), lora_request=world.request("mlp"))
    engine.step()

    with pytest.raises(RuntimeError, match="all pinned or in use"):
        engine.add_lora(policy(2, world.path("all"), load_inplace=True))
    run(engine)

    assert answer(engine, policy(1, world.path("qv"))) == world.oracle().greedy("qv", PROMPT, 6)
    with pytest.raises(ValueError, match="belongs to adapter 'policy-1'"):
        engine.add_request("refused", PROMPT, greedy(2), lora_request=policy(2, world.path("all")))


@pytest.mark.parametrize("why", ["no memory", "gone"])
def test_another_name_for_what_cannot_be_loaded_is_not_known(world, tmp_path, why):
    folder = shutil.copytree(world.path("qv"), tmp_path / "mine")
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    engine.add_lora(policy(1, folder))
    engine.add_lora(world.request("mlp"))
    if why == "gone":
        weights = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").unlink()
    else:
        engine.pin_lora(3)

    with pytest.raises(RuntimeError if why == "no memory" else FileNotFoundError):
        engine.add_lora(LoRARequest("alias", ID, str(folder)))

    assert engine.adapters.by_name == {"policy-1": ID, "mlp": 3}
    if why == "gone":
        (folder / "adapter_model.safetensors").write_bytes(weights)
    else:
        engine.unpin_lora(3)
    assert answer(engine, "policy-1") == world.oracle().greedy("qv", PROMPT, 6)
    engine.add_lora(LoRARequest("alias", 10, str(world.path("all"))))
    assert answer(engine, "alias") == world.oracle().greedy("all", PROMPT, 6)


@pytest.mark.parametrize("load_inplace", [True, False], ids=["reload", "first load"])
def test_a_slot_that_cannot_be_written_leaves_the_adapter_known_as_before(world, monkeypatch, load_inplace):
    """Its weights have been read into memory by then."""
    engine = world.engine()
    if load_inplace:
        engine.add_lora(policy(1, world.path("qv")))
        evict(engine, world)
    known = dict(engine.adapters.by_name)
    with monkeypatch.context() as failing:
        failing.setattr(engine.adapters.manager.wrapped, "write", lambda lora, slot: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add_lora(policy(2, world.path("all"), load_inplace=load_inplace))

    assert engine.adapters.by_name == known and ID not in engine.list_loras()
    if load_inplace:
        assert_is_known_as(engine, world, "qv", 1, [policy(2, world.path("all"))])
    else:
        assert answer(engine, policy(3, world.path("mlp"))) == world.oracle().greedy("mlp", PROMPT, 6)


def test_left_to_a_pin_it_is_told_to_who_pins_and_the_last_good_folder_serves(world, bad):
    """Nobody else reads it: the request that ordered the reload of what is not in memory was aborted."""
    engine = world.engine()
    engine.add_lora(policy(1, world.path("qv")))
    evict(engine, world)
    engine.add_request("a", PROMPT, greedy(4), lora_request=policy(2, bad["all"], load_inplace=True))
    engine.abort_request("a")

    with pytest.raises(ValueError, match="NaN"):
        engine.pin_lora(ID)

    assert engine.debug_info()["pinned"] == []
    assert_is_known_as(engine, world, "qv", 1, [policy(2, bad["all"])])


def test_that_add_lora_found_out_is_told_to_the_request_that_ordered_it_too(world, bad):
    engine = world.engine()
    engine.add_lora(policy(1, world.path("qv")))
    engine.add_request("a", PROMPT, greedy(4), lora_request=policy(2, bad["all"], load_inplace=True))

    with pytest.raises(ValueError, match="NaN"):
        engine.add_lora(policy(2, bad["all"]))

    assert "NaN" in run(engine)["a"].error
    assert_is_known_as(engine, world, "qv", 1, [policy(2, bad["all"])])


def test_a_folder_that_is_gone_ends_its_own_requests_and_those_of_the_next_one_are_answered(world, tmp_path):
    """A trainer has deleted the policy before; nobody had read it into memory yet."""
    folder = shutil.copytree(world.path("qv"), tmp_path / "mine")
    engine = world.engine()
    engine.add_request("old", PROMPT, greedy(6), lora_request=policy(1, folder))
    engine.add_request("new", PROMPT, greedy(6), lora_request=policy(2, world.path("all"), load_inplace=True))
    shutil.rmtree(folder)

    outputs = run(engine)

    assert "policy-1" in outputs["old"].error
    assert tokens_of(outputs["new"]) == world.oracle().greedy("all", PROMPT, 6)
    assert_is_known_as(engine, world, "all", 2, [policy(1, folder)])


class TestWhatPromptsDependOn:
    @by_way
    def test_is_that_of_the_last_good_folder(self, tokens, tmp_path, order, runs):
        """Of two that add tokens, one comes back after a bad plain one, the other goes with a bad folder."""
        engine = tokens.engine(lora_extra_vocab_size=4)
        cats, plain = tokens.path("cats"), tokens.path("plain")
        engine.add_lora(policy(1, cats))
        order_reload(
            engine,
            policy(2, spoiled(plain, tmp_path / "plain"), load_inplace=True),
            order,
            runs,
            policy(1, cats),
        )
        engine.add_request("new token", [5, V, V + 1], greedy(4), lora_request=policy(1, cats))
        assert tokens_of(run(engine)["new token"]) == tokens.answer("cats", [5, V, V + 1], 4)

        engine.remove_lora(ID)
        engine.add_lora(policy(1, plain))
        order_reload(
            engine,
            policy(2, spoiled(cats, tmp_path / "cats"), load_inplace=True),
            order,
            runs,
            policy(1, plain),
        )

        with pytest.raises(ValueError, match="prompt token ids"):
            engine.add_request("new token", [5, V], greedy(4), lora_request=policy(1, plain))
