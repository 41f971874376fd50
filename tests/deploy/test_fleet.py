"""Several engines behind one server: names, versions and errors. Without Ray; tests/deploy/test_ray_fleet.py has it."""

import asyncio
import random
import threading
from dataclasses import replace

import httpx
import openai
import pytest
from local_fleet import copied, fleet
from pydantic import ValidationError

from deploy.fleet import fleet_llm
from deploy.fleet.arguments import FleetArgs
from deploy.fleet.fleet_llm import where_last_used
from deploy.fleet.replica import Replica, Version
from deploy.fleet.seats import Seats
from minivllm.policies.routing import POLICIES
from minivllm.sampling_params import SamplingParams
from minivllm.server.errors import MOST_CHARACTERS
from minivllm.serving.async_llm import AsyncLLM
from tests.worlds.processes import hold_after
from tests.worlds.servers import (
    BASE_NAME,
    GREEDY,
    Answers,
    client_of,
    order,
    served,
    text_of,
    tokenizer_with_template,
)
from tests.worlds.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def answers(world):
    return Answers(world)


@pytest.fixture
def both(world, monkeypatch):
    """Server and engines."""
    monkeypatch.setattr(fleet_llm, "SECONDS_TO_ANSWER", PATIENCE)
    with fleet(world, "qv", "all", lora_root=str(world.folder), allow_runtime_lora=True) as both:
        yield both


@pytest.fixture
def server(both):
    return both[0]


@pytest.fixture
def engines(both):
    return both[1]


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def test_every_engine_answers_for_every_name_as_peft_does(client, answers):
    for name in (BASE_NAME, "qv", "all"):
        texts = [text_of(client, name) for _ in range(2)]  # one of each engine

        assert texts == [answers.text(name, "a tale")] * 2


@pytest.fixture
def go(engines, tmp_path):
    """A file: without it no engine hands out more than two tokens."""
    for each in engines.replicas:
        each.llm._client.call(hold_after, 3, tmp_path / "go").result(PATIENCE)
    yield tmp_path / "go"
    (tmp_path / "go").touch()


def test_a_stream_brings_an_answer_in_pieces(client, answers, go):
    stream = iter(
        client.completions.create(model="all", prompt="a tale", stream=True, **{**GREEDY, "max_tokens": 20})
    )

    first = next(stream).choices[0].text
    go.touch()
    rest = "".join(chunk.choices[0].text for chunk in stream)

    assert first and rest
    assert first + rest == answers.text("all", "a tale", 20)


def test_whoever_leaves_a_request_is_told_what_had_come_of_it(server, engines, go):
    llm, params = server.server.state.llm, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    told = {"delta": [], "final": [], "whole": []}

    async def main():
        streamed = llm.generate("abc", params, "a", on_abort=told["delta"].append)
        first = await anext(streamed)
        await streamed.aclose()
        waiting = llm.generate("abc", params, "b", output_kind="final", on_abort=told["final"].append)
        task = asyncio.ensure_future(anext(waiting))
        while engines.num_given["b"] < 1:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        go.touch()
        async for output in llm.generate("abc", params, "c", on_abort=told["whole"].append):
            last = output
        return first, last

    first, last = asyncio.run(main())

    [streamed], [waiting] = told["delta"], told["final"]
    assert streamed.outputs[0].token_ids == first.outputs[0].token_ids != []
    for each in (streamed, waiting):
        tokens = each.outputs[0].token_ids
        assert tokens and tokens == last.outputs[0].token_ids[: len(tokens)]
    assert {each.outputs[0].finish_reason for each in (streamed, waiting)} == {"abort"}
    assert told["whole"] == []


def test_a_name_that_nobody_knows_is_404_and_an_engines_refusal_is_one_sentence(client, http):
    with pytest.raises(openai.NotFoundError, match="there are: tiny, all, qv"):
        text_of(client, "nobody")
    refused = http.post("/v1/completions", json={"model": "qv", "prompt": "x" * 2000})

    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "context" in message or "max_model_len" in message
    assert "Traceback" not in message
    assert len(message) <= MOST_CHARACTERS


def test_what_is_read_again_answers_for_all_engines_and_never_mixed(client, http, answers, world):
    order(http, "load", "moving", world.path("mlp")).raise_for_status()
    texts = {name: answers.text(name, "a tale", 12) for name in ("mlp", "patterns")}
    seen, stop = [], threading.Event()

    def ask_on():
        while not stop.is_set():
            seen.append(text_of(client, "moving", max_tokens=12))

    askers = [threading.Thread(target=ask_on) for _ in range(3)]
    for asker in askers:
        asker.start()
    wait_until(lambda: len(seen) > 5)
    reloaded = order(http, "load", "moving", world.path("patterns"), load_inplace=True)
    after = [text_of(client, "moving", max_tokens=12) for _ in range(4)]
    stop.set()
    for asker in askers:
        asker.join()

    assert reloaded.status_code == 200, reloaded.text
    assert texts["mlp"] != texts["patterns"]
    assert set(seen) <= set(texts.values())
    assert texts["mlp"] in seen
    assert after == [texts["patterns"]] * 4


def test_an_engine_that_an_order_did_not_reach_carries_it_out_before_it_answers(
    client, http, answers, engines, world
):
    order(http, "load", "moving", world.path("mlp")).raise_for_status()
    before = [text_of(client, "moving") for _ in range(2)]
    engines.deaf = {0, 1}

    order(http, "load", "moving", world.path("patterns"), load_inplace=True).raise_for_status()
    after = [text_of(client, "moving") for _ in range(2)]

    assert before == [answers.text("mlp", "a tale")] * 2
    assert after == [answers.text("patterns", "a tale")] * 2


def test_an_unloaded_adapter_is_nobodys_and_its_name_is_free(client, http, answers, engines, world):
    order(http, "load", "leaving", world.path("mlp")).raise_for_status()
    for _ in range(2):
        text_of(client, "leaving")

    unloaded = order(http, "unload", "leaving")
    after = http.post("/v1/completions", json={"model": "leaving", "prompt": "x"})

    assert (unloaded.status_code, after.status_code) == (200, 404)
    wait_until(lambda: not any("leaving" in each.llm.adapter_names for each in engines.replicas))
    order(http, "load", "leaving", world.path("patterns")).raise_for_status()
    assert [text_of(client, "leaving") for _ in range(2)] == [answers.text("patterns", "a tale")] * 2


def test_when_an_engine_ends_its_requests_get_an_error_and_the_others_answers(client, answers, engines):
    engines.replicas[0].llm.shutdown()

    statuses, texts = [], []
    for _ in range(4):
        try:
            texts.append(text_of(client, "all"))
        except openai.APIStatusError as error:
            statuses.append(error.status_code)

    assert statuses == [503, 503]
    assert texts == [answers.text("all", "a tale")] * 2


def test_an_engine_that_ends_in_the_middle_of_a_stream_ends_it_with_an_error(client, engines, go):
    stream = client.completions.create(model="all", prompt="x", stream=True, **{**GREEDY, "max_tokens": 400})
    chunks = iter(stream)
    next(chunks)
    ends = [threading.Thread(target=each.llm.shutdown) for each in engines.replicas]
    for end in ends:
        end.start()
    wait_until(lambda: all(each.llm._client._stopping for each in engines.replicas))
    go.touch()
    for end in ends:
        end.join()

    with pytest.raises(openai.APIError, match="shut down"):
        list(chunks)


def test_a_fleets_numbers_are_sums_and_an_adapter_is_where_it_was_used_last(client, http):
    for _ in range(2):
        text_of(client, "qv")

    numbers = dict(line.split(" ") for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    adapters = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}

    assert numbers['minivllm:adapters_in_slots{model_name="tiny"}'] == "3.0"  # qv in both, all in one
    assert numbers['vllm:generation_tokens_total{model_name="tiny"}'] == "16.0"
    assert adapters["qv"]["last_used"] is not None
    assert where_last_used([{1: {"last_used": None}}, {1: {"last_used": 3.0}}, {1: {"last_used": 2.0}}]) == {
        1: {"last_used": 3.0}
    }


def test_a_slot_cannot_be_pinned_since_there_are_several_engines(http):
    refused = order(http, "pin", "qv")

    assert refused.status_code == 400
    assert "several" in refused.json()["error"]["message"]


def test_health_is_that_of_the_engines(http, engines):
    before = http.get("/health").status_code
    for each in engines.replicas:
        each.llm.shutdown()

    assert (before, http.get("/health").status_code) == (200, 503)


def test_an_older_version_never_comes_back(world):
    llm = AsyncLLM.from_engine(world.engine(tokenizer_with_template()))
    replica = Replica(llm)
    (old,) = served(world, "mlp")
    new = replace(old, lora_path=str(world.path("patterns")))

    async def last_output(version):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        items = replica.generate("a tale", params, f"r{version.number}", version, "final")
        return [copied(item) async for item in items][-1]

    async def asked():
        return [await last_output(Version(*each)) for each in ((old, 1), (new, 2), (old, 1))]

    try:
        texts = [output.outputs[0].text for output in asyncio.run(asked())]
    finally:
        llm.shutdown()

    expected = [Answers(world).text(name, "a tale") for name in ("mlp", "patterns", "patterns")]
    assert texts == expected


def found_in_a_slot(policy, requests=20_000):
    """Share of the requests that find their adapter, one after the other: Zipf over 40, two engines of four slots."""
    chooser, seats, slots = random.Random(0), Seats(POLICIES[policy](0), room=40), {"a": [], "b": []}
    seats.update(slots)
    found = 0
    for adapter in chooser.choices(range(1, 41), [1 / rank for rank in range(1, 41)], k=requests):
        engine = seats.choose(adapter, slots)
        seats.of[engine].send(adapter)
        found += adapter in slots[engine]
        slots[engine] = [adapter, *(each for each in slots[engine] if each != adapter)][:4]
    return found / requests


@pytest.mark.parametrize("policy", ["hashing", "affine"])
def test_affinity_finds_half_as_many_adapters_again_as_chance(policy):
    assert found_in_a_slot(policy) >= 1.5 * found_in_a_slot("random")


def test_an_engine_more_takes_adapters_from_all_and_moves_none_between_others():
    seats = Seats(POLICIES["hashing"](0), room=4)
    seats.update(["b", "a"])
    before = {adapter: seats.choose(adapter, ["a", "b"]) for adapter in range(1, 200)}

    seats.update({"c", "b", "a"})
    after = {adapter: seats.choose(adapter, ["a", "b", "c"]) for adapter in range(1, 200)}

    assert {(old, after[adapter]) for adapter, old in before.items()} == {
        *(("a", "a"), ("b", "b"), ("a", "c"), ("b", "c"))
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modle": "x"}, "modle"),
        ({"min_replicas": 3, "max_replicas": 2}, "less than min_replicas 3"),
        ({"engine": {"lora_extra_vocab_size": 8}}, "leave lora_extra_vocab_size out"),
        ({"routing": "by-luck"}, "hashing"),
    ],
)
def test_what_no_fleet_can_be_is_refused_before_it_starts(args, words):
    with pytest.raises(ValidationError, match=words):
        FleetArgs(**args)


def test_engines_that_have_no_cpus_are_refused_before_ray_waits_for_some():
    args = FleetArgs(num_cpus=1.5, min_replicas=3, max_replicas=9)

    args.check_cpus(4.5)
    with pytest.raises(
        ValueError, match=r"3 engines of num_cpus 1\.5 need 4\.5 CPUs, and Ray has 4; pass --cpus 5"
    ):
        args.check_cpus(4)


def test_an_engine_takes_as_many_requests_as_it_runs_and_queues():
    args = FleetArgs(engine={"max_num_seqs": 6, "max_loras": 3}, max_queued=5)

    assert (args.max_ongoing_requests, args.slots) == (11, 3)


def test_a_refused_reload_changes_nothing(client, http, answers, world):
    broken = world.folder / "broken-for-a-fleet"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_bytes((world.path("qv") / "adapter_config.json").read_bytes())
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")

    refused = order(http, "load", "qv", broken, load_inplace=True)

    assert refused.status_code == 400
    assert "adapter_model.safetensors" in refused.json()["error"]["message"]
    assert [text_of(client, "qv") for _ in range(2)] == [answers.text("qv", "a tale")] * 2


def test_a_key_stands_in_the_environment_or_in_the_arguments(monkeypatch):
    monkeypatch.setenv("MINIVLLM_API_KEY", "from the environment")

    assert FleetArgs(model="m").server_settings().api_keys == ("from the environment",)
    assert FleetArgs(model="m", api_keys=["given"]).server_settings().api_keys == ("given",)


def test_whoever_leaves_ends_its_request_in_the_engine(client, engines):
    stream = client.completions.create(model="qv", prompt="x", stream=True, **{**GREEDY, "max_tokens": 400})
    next(iter(stream))
    stream.close()

    wait_until(lambda: not any(each.llm._open for each in engines.replicas))
