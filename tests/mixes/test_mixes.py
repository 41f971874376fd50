"""What a mix is to an engine: one adapter, of its parts as they are when a request arrives; and what is refused."""

import json
import pickle
import shutil

import pytest
from mixed_world import mixed_world
from safetensors.torch import load_file, save_file

from minivllm import LoRARequest
from minivllm.mixes import mix
from tests.worlds.adapters import ADAPTERS, save_adapter
from tests.worlds.engines import greedy, run, snapshot, tokens_of

PROMPT = [5, 17, 40, 8, 22, 9, 31, 12, 44]
SQL, JSON = LoRARequest("sql", 1, "/sql"), LoRARequest("json", 2, "/json")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return mixed_world(tmp_path_factory)


@pytest.fixture
def engine(world):
    return world.engine(max_loras=2, max_cpu_loras=4)


def mixed(world, *weights, **changes):
    return mix([(world.request(name, **changes), weight) for name, weight in weights])


def ask(engine, lora_request, request_id="0", tokens=6):
    engine.add_request(request_id, PROMPT, greedy(tokens), lora_request=lora_request)
    return run(engine)[request_id]


def expected(world, *weights, tokens=6):
    return world.oracle().greedy(world.mixed_in_peft(weights), PROMPT, tokens)


# ---- the request --------------------------------------------------------------------------------------------------


def test_the_order_is_nothing_and_the_weights_are_everything():
    one = mix([(SQL, 0.7), (JSON, 0.3)])

    assert one == mix([(JSON, 0.3), (SQL, 0.7)]) and one.lora_name == "json:0.3+sql:0.7"
    others = [
        mix([(SQL, 0.3), (JSON, 0.7)]),
        mix([(SQL, 0.7), (JSON, 0.3000000000000001)]),
        mix([(SQL, 0.7)]),
        mix([(SQL, 0.7), (JSON, -0.3)]),
    ]
    assert len({each.lora_int_id for each in [one, *others]}) == 5


def test_weights_of_one_adapter_are_summed():
    assert mix([(SQL, 0.5), (JSON, 1), (SQL, 0.25)]) == mix([(SQL, 0.75), (JSON, 1)])
    assert mix({SQL: 0.75, JSON: 1}) == mix([(SQL, 0.75), (JSON, 1)])
    assert mix([(SQL, 0.5), ("sql", 0.25)]) == mix([("sql", 0.5), (SQL, 0.25)]) == mix([(SQL, 0.75)])


def test_no_two_mixes_have_one_name():
    plain, sly = mix([("a", 1.0), ("b", 2.0)]), mix([("a:1.0+b", 2.0)])

    assert plain.lora_name == "a:1.0+b:2.0" and sly.lora_name == '"a:1.0+b":2.0'


def test_goes_from_process_to_process():
    one = mix([(SQL, 0.7), ("json", 0.3)])

    assert pickle.loads(pickle.dumps(one)) == one


REFUSED = {
    "nothing": ([], ValueError, "1 to 8 adapters, got 0"),
    "nine": ([(f"a{i}", 1) for i in range(9)], ValueError, "1 to 8 adapters, got 9"),
    "not a number": (
        [("sql", float("nan"))],
        ValueError,
        "weight of adapter 'sql' in a mix must be a finite",
    ),
    "infinity": ([("sql", float("inf"))], ValueError, "weight of adapter 'sql'"),
    "a long int": ([("sql", 10**400)], ValueError, "weight of adapter 'sql'"),
    "true": ([("sql", True)], ValueError, "got True"),
    "a text": ([("sql", "0.5")], ValueError, "got '0.5'"),
    "infinite together": ([("sql", 1.7e308), ("sql", 1.7e308)], ValueError, "are infinite together"),
    "no adapter": ([(None, 1)], TypeError, "got None"),
    "no name": ([("", 1)], TypeError, "got ''"),
    "no pairs": (["sql", "json"], TypeError, "of pairs of an adapter and a weight, got 'sql'"),
    "a mix": ([(mix([(SQL, 1)]), 1)], ValueError, "is a mix itself"),
    "a reload": ([(LoRARequest("sql", 1, "/sql", load_inplace=True), 1)], ValueError, "load it again first"),
    "two of a name": (
        [(SQL, 1), (LoRARequest("sql", 3, "/x"), 1)],
        ValueError,
        "two adapters of the name 'sql'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_by_name(case):
    parts, kind, sentence = REFUSED[case]

    with pytest.raises(kind, match=sentence):
        mix(parts)


# ---- in an engine -------------------------------------------------------------------------------------------------


def test_counts_as_one_adapter_and_takes_the_sum_of_ranks(world, engine):
    one = mixed(world, ("qv", 0.7), ("all", 0.3))

    ask(engine, one)

    manager = engine.adapters.manager
    info = manager.get_lora_info(one.lora_int_id)
    assert list(manager.list_active_adapters()) == [one.lora_int_id]
    assert (info["name"], info["rank"], info["loads"], info["activations"]) == ("all:0.3+qv:0.7", 12, 1, 1)
    assert engine.get_metrics()["lora"]["by_adapter"][one.lora_int_id]["steps"] == 6


def test_the_same_mix_finds_its_blocks_and_no_other_does(world, engine):
    found = [
        ask(engine, lora_request).num_cached_tokens
        for lora_request in (
            mixed(world, ("qv", 0.7), ("all", 0.3)),
            mixed(world, ("all", 0.3), ("qv", 0.7)),
            mixed(world, ("qv", 0.3), ("all", 0.7)),
            world.request("qv"),
            None,
        )
    ]

    assert found == [0, 8, 0, 0, 0]


def test_a_part_loaded_again_is_in_the_next_request_and_in_none_under_way(world, engine):
    engine.add_lora(world.request("qv"))
    one = mixed(world, ("qv", 0.7), ("all", 0.3))
    engine.add_request("before", PROMPT, greedy(6), lora_request=one)
    engine.step()

    again = str(world.path("qv-again"))
    engine.add_lora(world.request("qv", lora_path=again, load_inplace=True))
    engine.add_request(
        "after", PROMPT, greedy(6), lora_request=mix([("qv", 0.7), (world.request("all"), 0.3)])
    )
    outputs = run(engine)

    assert tokens_of(outputs["before"]) == expected(world, ("qv", 0.7), ("all", 0.3))
    assert tokens_of(outputs["after"]) == expected(world, ("qv-again", 0.7), ("all", 0.3))
    assert outputs["after"].num_cached_tokens == 0


def test_an_order_to_load_a_part_again_counts_before_it_is_done(world, engine):
    """The part's own requests hold its reload up, and nobody who mixes it has to wait for them."""
    engine.add_request("part", PROMPT, greedy(12), lora_request=world.request("qv"))
    engine.step()
    again = world.request("qv", lora_path=str(world.path("qv-again")), load_inplace=True)
    assert not engine.add_lora(again)

    engine.add_request("mix", PROMPT, greedy(3), lora_request=mix([("qv", 0.7), (world.request("all"), 0.3)]))
    outputs = run(engine)

    assert tokens_of(outputs["mix"]) == expected(world, ("qv-again", 0.7), ("all", 0.3), tokens=3)
    assert tokens_of(outputs["part"]) == expected(world, ("qv", 1), tokens=12)


def test_a_part_unloaded_is_in_requests_under_way_and_in_none_by_its_name(world, engine, tmp_path):
    folder = shutil.copytree(world.path("qv"), tmp_path / "qv")
    engine.add_lora(world.request("qv", lora_path=str(folder)))
    one = mix([("qv", 0.7), (world.request("all"), 0.3)])
    engine.add_request("before", PROMPT, greedy(6), lora_request=one)
    engine.step()

    engine.remove_lora(1)
    shutil.rmtree(folder)

    with pytest.raises(ValueError, match=r"adapter 'qv' of a mix is unknown \(known: all:0.3\+qv:0.7\)"):
        engine.add_request("after", PROMPT, greedy(6), lora_request=one)
    assert tokens_of(run(engine)["before"]) == expected(world, ("qv", 0.7), ("all", 0.3))


@pytest.mark.parametrize("by", ["the mix", "a load"])
def test_a_part_that_came_back_with_other_weights_is_read_anew(world, engine, tmp_path, by):
    folder = shutil.copytree(world.path("qv"), tmp_path / "qv")
    part = world.request("qv", lora_path=str(folder))
    one = mix([(part, 0.7), (world.request("all"), 0.3)])
    engine.add_lora(part)
    ask(engine, one)

    engine.remove_lora(1)
    shutil.rmtree(folder)
    shutil.copytree(world.path("qv-again"), folder)
    if by == "a load":
        engine.add_lora(part)  # its new record begins with generation 0, as the old one did

    assert tokens_of(ask(engine, one)) == expected(world, ("qv-again", 0.7), ("all", 0.3))


def test_an_order_to_load_a_part_again_counts_when_nobody_has_named_the_part_before(world, engine, tmp_path):
    folder = shutil.copytree(world.path("qv"), tmp_path / "qv")
    part = world.request("qv", lora_path=str(folder))
    one = mix([(part, 0.7), (world.request("all"), 0.3)])
    ask(engine, one)

    shutil.rmtree(folder)
    shutil.copytree(world.path("qv-again"), folder)
    engine.add_lora(world.request("qv", lora_path=str(folder), load_inplace=True))

    assert tokens_of(ask(engine, one)) == expected(world, ("qv-again", 0.7), ("all", 0.3))


def test_a_part_that_is_being_unloaded_is_refused(world, engine):
    engine.add_request("part", PROMPT, greedy(6), lora_request=world.request("qv"))
    engine.step()
    engine.remove_lora(1)

    with pytest.raises(ValueError, match=r"adapter 'qv'.*being unloaded"):
        engine.add_request("mix", PROMPT, greedy(6), lora_request=mixed(world, ("qv", 0.5)))


def test_a_part_at_another_path_is_refused(world, engine):
    engine.add_lora(world.request("qv"))

    with pytest.raises(ValueError, match="lora_int_id 1 belongs to adapter 'qv'"):
        engine.add_lora(mixed(world, ("qv", 0.5), lora_path=str(world.path("all"))))


def test_a_pin_holds_a_mix(world, engine):
    one = mixed(world, ("qv", 0.7), ("all", 0.3))
    engine.add_lora(one)
    engine.pin_lora(one.lora_int_id)

    for number, name in enumerate(world.names):
        ask(engine, world.request(name), str(number))

    assert one.lora_int_id in engine.adapters.manager.list_active_adapters()
    assert tokens_of(ask(engine, one)) == expected(world, ("qv", 0.7), ("all", 0.3))


def test_mixes_without_end_are_forgotten(world, engine):
    for number in range(20):
        ask(engine, mixed(world, ("qv", number / 8), ("all", 0.3)))

    assert len(engine.adapters.adapters) <= engine.adapters.manager.capacity + 1
    assert len(engine.get_metrics()["lora"]["by_adapter"]) <= engine.adapters.manager.capacity + 1


def test_tensors_in_memory_are_mixed_too(world, engine):
    folder = world.path("qv")
    part = LoRARequest(
        "trained",
        9,
        lora_tensors=load_file(folder / "adapter_model.safetensors"),
        peft_config=json.loads((folder / "adapter_config.json").read_text()),
    )

    answer = ask(engine, mix([(part, 0.7), (world.request("all"), 0.3)]))

    assert tokens_of(answer) == expected(world, ("qv", 0.7), ("all", 0.3))


def test_a_mix_is_asked_for_by_its_name_while_the_engine_knows_it(world, engine):
    ask(engine, mixed(world, ("qv", 0.7), ("all", 0.3)))

    assert tokens_of(ask(engine, "all:0.3+qv:0.7")) == expected(world, ("qv", 0.7), ("all", 0.3))
    with pytest.raises(ValueError, match=r"'all:0.3\+qv:0.7' is a mix itself"):
        engine.add_lora(mix([("all:0.3+qv:0.7", 2)]))


# ---- what cannot be mixed -----------------------------------------------------------------------------------------

UNMIXABLE = {
    "DoRA": ({"use_dora": True}, {"enable_dora": True}, "'odd' cannot be mixed: it has use_dora"),
    "aLoRA": (
        {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
        {},
        "'odd' cannot be mixed: it has alora_invocation_tokens",
    ),
    "a head": ({"target_modules": ["q_proj", "lm_head"]}, {}, "'odd' cannot be mixed: lm_head is no linear"),
    "an embedding": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        {},
        "'odd' cannot be mixed: model.embed_tokens is no linear",
    ),
    "a bias": ({"lora_bias": True}, {"enable_lora_bias": True}, "'odd' cannot be mixed: .* has bias"),
    "modules_to_save": ({"modules_to_save": ["norm"]}, {}, "adapter 'odd'.*modules_to_save"),
    "too much rank": (
        {"r": 30},
        {},
        r"ranks 30 \+ 4 = 34, .*greater than max_lora_rank 32; pass --max-lora-rank 34",
    ),
}


@pytest.mark.parametrize("case", UNMIXABLE)
def test_what_cannot_be_mixed_is_refused_by_name_and_changes_nothing(world, tmp_path, case):
    config, options, sentence = UNMIXABLE[case]
    save_adapter(tmp_path / "odd", world.base, 3, **{**ADAPTERS["qv"], **config})
    engine = world.engine(**options)
    ask(engine, world.request("qv"))
    before = snapshot(engine)

    with pytest.raises(ValueError, match=sentence):
        ask(engine, mix([(LoRARequest("odd", 7, str(tmp_path / "odd")), 0.5), (world.request("qv"), 0.5)]))

    assert snapshot(engine) == before


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_part_with_numbers_that_are_none_ends_its_request_alone(world, engine, tmp_path, number):
    folder = shutil.copytree(world.path("qv"), tmp_path / "qv")
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = number
    save_file(tensors, folder / "adapter_model.safetensors")

    one = mix([(LoRARequest("spoilt", 7, str(folder)), 0.5), (world.request("all"), 0.5)])
    engine.add_request("all", PROMPT, greedy(3), lora_request=world.request("all"))
    engine.add_request("spoilt", PROMPT, greedy(3), lora_request=one)
    outputs = run(engine)

    assert "adapter 'spoilt'" in outputs["spoilt"].error and "NaN" in outputs["spoilt"].error
    assert tokens_of(outputs["all"]) == expected(world, ("all", 1), tokens=3)


def test_a_weight_that_makes_numbers_infinite_ends_its_request_alone(world, engine):
    one = mixed(world, ("qv", 1e308), ("all", 0.5))

    error = ask(engine, one).error

    assert "weights 0.5, 1e+308 make infinite" in error
