"""What went wrong in released servers, played through the whole engine. The numbers are those of the incidents.

The phases test the part that each mistake sat in; here it is asked what a user would have seen.
"""

import shutil

import pytest

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import token_ids
from tests.worlds.spoiled_adapters import edit_weights, fill, renamed

PROMPT = token_ids(13, 3)


@pytest.fixture
def folder(world, tmp_path):
    """A copy of adapter 'qv' to change."""
    return shutil.copytree(world.path("qv"), tmp_path / "mine")


def ask(engine, world, adapter, prompt=PROMPT, max_tokens=6, request_id="a"):
    """One request alone; its output, which must be right."""
    engine.add_request(request_id, prompt, greedy(max_tokens), lora_request=world.request(adapter))
    output = run(engine)[request_id]
    assert tokens_of(output) == world.oracle().greedy(adapter, prompt, max_tokens)
    return output


def test_02_the_same_batch_after_the_slots_changed_hands_gets_its_own_adapter(world):
    engine = world.engine(max_loras=2, max_cpu_loras=4, enable_prefix_caching=False)
    ask(engine, world, "qv", prompt=[5], max_tokens=1)
    engine.add_lora(world.request("mlp"))
    engine.remove_lora(1)
    engine.add_lora(world.request("all"))
    assert engine.debug_info()["slots"] == [2, 3]

    # The very batch of the first step again: only the slot table tells that row 0 is now slot 1.
    engine.adapters.manager.touch_adapter(2)
    output = ask(engine, world, "qv", prompt=[5], max_tokens=1)

    assert engine.debug_info()["slots"] == [2, 1]
    assert output.error is None


def test_03_a_batch_is_never_admitted_that_pins_leave_no_slot_for(world):
    engine = world.engine(max_loras=2)
    engine.add_lora(world.request("qv"))
    engine.pin_lora(1)

    for name in ("all", "mlp"):
        engine.add_request(name, PROMPT, greedy(5), lora_request=world.request(name))
    outputs = run(engine)

    for name in ("all", "mlp"):
        assert tokens_of(outputs[name]) == world.oracle().greedy(name, PROMPT, 5)
    assert all(record.slots[0] == "qv" for record in engine.trace.records)


@pytest.mark.parametrize("how", ["reloaded", "unloaded and added again", "evicted and read again"])
def test_07_other_weights_under_the_same_name_find_no_keys_and_values_of_the_old(world, folder, how):
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    oracle = world.oracle()
    mine = LoRARequest("mine", 7, str(folder))
    engine.add_request("old", PROMPT, greedy(6), lora_request=mine)
    old = tokens_of(run(engine)["old"])

    edit_weights(folder, lambda weights: {name: w.flip(0).contiguous() for name, w in weights.items()})
    if how == "reloaded":
        mine = LoRARequest("mine", 7, str(folder), load_inplace=True)
    elif how == "unloaded and added again":
        engine.remove_lora(7)
    else:
        engine.add_lora(world.request("all"))
    engine.add_lora(mine)  # so that it is known when the prompt is looked up
    mine = LoRARequest("mine", 7, str(folder))
    engine.add_request("new", PROMPT, greedy(6), lora_request=mine)
    output = run(engine)["new"]

    oracle.load("new", folder)
    expected = oracle.greedy("new", PROMPT, 6)
    oracle.forget("new")
    assert tokens_of(output) == expected != old
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("old", "new"), [("q_proj", "query"), ("layers.1.", "layers.7."), ("model.layers.", "text_model.layers.")]
)
def test_08_an_adapter_for_another_model_is_refused_with_the_names_that_do_not_match(world, folder, old, new):
    engine = world.engine()
    renamed(old, new)(folder)

    with pytest.raises(ValueError, match=new) as error:
        engine.add_request("a", PROMPT, greedy(), lora_request=LoRARequest("mine", 7, str(folder)))

    assert "q_proj" in str(error.value)
    assert not engine.has_unfinished_requests()


def test_10_a_third_adapter_is_served_while_the_others_keep_coming(world):
    engine = world.engine(max_loras=2, max_lora_wait_steps=10, max_num_seqs=6)
    lengths = {}

    def send(name, max_tokens):
        request_id = f"{name} {len(lengths)}"
        lengths[request_id] = max_tokens
        engine.add_request(request_id, PROMPT, greedy(max_tokens), lora_request=world.request(name))

    def keep_them_coming():
        """Two of each, which never end together, so that no slot ever falls free by itself."""
        for name in ("qv", "all"):
            if sum(r.lora_request.lora_name == name for r in engine.scheduler.requests.values()) < 2:
                send(name, max_tokens=5)

    for name in ("qv", "all"):
        send(name, max_tokens=2)
        send(name, max_tokens=5)
    engine.step()
    engine.add_request("third", PROMPT, greedy(5), lora_request=world.request("mlp"))
    finished = {}
    # Its wait, at most a turn of the one that makes way, and its own five tokens.
    for _ in range(10 + 10 + 5):
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        if "third" in finished:
            break
        keep_them_coming()

    assert "third" in finished, "it waited longer than the bound"
    assert tokens_of(finished["third"]) == world.oracle().greedy("mlp", PROMPT, 5)
    outputs = run(engine)
    for request_id, output in outputs.items():
        expected = world.oracle().greedy(request_id.split()[0], PROMPT, lengths[request_id])
        assert tokens_of(output) == expected


def test_11_an_unloaded_adapter_is_gone_from_slot_and_memory_and_its_requests_had_it_to_the_end(world):
    engine = world.engine()
    engine.add_request("a", PROMPT, greedy(6), lora_request=world.request("qv"))
    engine.step()

    engine.remove_lora(1)

    with pytest.raises(ValueError, match="is being unloaded"):
        engine.add_request("b", PROMPT, greedy(6), lora_request=world.request("qv"))
    assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 6)
    assert engine.debug_info()["slots"] == [None, None]
    assert engine.debug_info()["adapters"] == []
    assert engine.list_loras() == set()
    # What is asked for under its id from now on is what is meant now.
    engine.add_request("c", PROMPT, greedy(6), lora_request=world.request("mlp", lora_int_id=1))
    assert tokens_of(run(engine)["c"]) == world.oracle().greedy("mlp", PROMPT, 6)


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        lambda folder: (folder / "adapter_config.json").unlink(),
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"<html>404</html>"),
        lambda folder: edit_weights(folder, lambda ws: {n: w[:, :-1].contiguous() for n, w in ws.items()}),
    ],
    ids=["nothing there", "no config", "no weights", "another file", "other shapes"],
)
def test_12_what_is_no_adapter_is_never_acknowledged(world, folder, spoil):
    engine = world.engine()
    spoil(folder)

    with pytest.raises((FileNotFoundError, ValueError), match="mine"):
        engine.add_lora(LoRARequest("mine", 7, str(folder)))
    with pytest.raises((FileNotFoundError, ValueError), match="mine"):
        engine.add_request("a", PROMPT, greedy(), lora_request=LoRARequest("mine", 7, str(folder)))

    assert engine.list_loras() == set()
    assert not engine.has_unfinished_requests()
    # Neither id nor name is taken by what never was.
    engine.add_request(
        "b", PROMPT, greedy(4), lora_request=world.request("all", lora_int_id=7, lora_name="mine")
    )
    assert tokens_of(run(engine)["b"]) == world.oracle().greedy("all", PROMPT, 4)


def test_12_an_adapter_whose_folder_has_gone_since_is_not_acknowledged_again(world, folder):
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    mine = LoRARequest("mine", 7, str(folder))
    assert engine.add_lora(mine)
    ask(engine, world, "all")
    shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError, match="mine"):
        engine.add_lora(mine)

    assert 7 not in engine.list_loras()


@pytest.mark.parametrize("good", [["all"], ["qv", "all"]], ids=["in a slot", "also in memory alone"])
def test_14_a_bad_adapter_costs_no_good_one_its_place(world, folder, good):
    engine = world.engine(max_loras=1, max_cpu_loras=len(good))
    for name in good:
        ask(engine, world, name)
    fill(folder, float("nan"))

    engine.add_request("bad", PROMPT, greedy(), lora_request=LoRARequest("mine", 7, str(folder)))
    output = run(engine)["bad"]

    assert output.outputs[0].finish_reason == "error"
    assert engine.debug_info()["slots"] == [2]
    for name in good:
        ask(engine, world, name)
    assert engine.get_metrics()["lora"]["loads"] == len(good)


def test_15_a_reload_happens_once_however_many_steps_the_request_takes(world):
    engine = world.engine()
    engine.add_lora(world.request("qv"))

    engine.add_request("a", PROMPT, greedy(9), lora_request=world.request("qv", load_inplace=True))
    run(engine)

    assert engine.get_metrics()["lora"]["loads"] == 2, "one order to load and one to reload are two readings"


def test_16_base_needs_no_slot_beside_as_many_adapters_as_slots(world):
    engine = world.engine(max_loras=2)
    for name in ("qv", None, "all"):
        engine.add_request(str(name), PROMPT, greedy(4), lora_request=world.request(name))

    first_step = engine.step()

    assert {output.request_id for output in first_step} == {"qv", "None", "all"}
    assert tokens_of(run(engine)["None"]) == world.oracle().greedy(None, PROMPT, 4)


@pytest.mark.parametrize("targets", [["o_proj"], ["q_proj", "k_proj", "down_proj"]])
def test_22_an_adapter_beyond_the_servers_target_modules_is_refused(world, targets):
    """Whether they share nothing or only a part: what is left out would be missed in silence."""
    engine = world.engine(target_modules=targets)

    with pytest.raises(ValueError, match="target_modules"):
        engine.add_request("a", PROMPT, greedy(), lora_request=world.request("patterns"))

    assert engine.debug_info()["adapters"] == []


def test_22_an_adapter_within_the_servers_target_modules_is_served(world):
    engine = world.engine(target_modules=["q_proj", "v_proj"])

    ask(engine, world, "qv")

    assert {name.split(".")[-1] for name in engine.adapters.manager.modules} == {"qkv_proj"}
