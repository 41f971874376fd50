"""`lora_mix` in requests of OpenAI's client: whose weights answer, and what is refused by name."""

import httpx
import pytest
from mixed_world import mixed_world

from tests.worlds.servers import BASE_NAME, client_of, serving
from tests.worlds.waiting import PATIENCE

GREEDY = {"temperature": 0, "max_tokens": 8}
PROMPT = [5, 17, 40, 8, 22, 9]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return mixed_world(tmp_path_factory)


@pytest.fixture
def server(world):
    options = {"lora_root": str(world.folder), "allow_runtime_lora": True, "has_text": False}
    keys = {"api_keys": ("all",), "adapter_keys": {"qv": "one", "all": "two", BASE_NAME: "two"}}
    with serving(world, "qv", "all", "mlp", **options, **keys) as server:
        yield server


@pytest.fixture
def client(server):
    with client_of(server, "all") as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers={"authorization": "Bearer all"}) as http:
        yield http


def ask(client, lora_mix, model=BASE_NAME, **more):
    extra = {"lora_mix": lora_mix, "ignore_eos": True, "return_token_ids": True}
    done = client.completions.create(model=model, prompt=PROMPT, extra_body=extra, **{**GREEDY, **more})
    return done.choices[0].token_ids


def expected(world, weights):
    return world.oracle().greedy(world.mixed_in_peft(weights), PROMPT, 8)


def test_each_gets_its_own_mix(client, world):
    mixes = [(("all", 0.3), ("qv", 0.7)), (("all", 0.7), ("qv", 0.3)), (("mlp", -0.5), ("qv", 1.5))]

    for weights in mixes:
        assert ask(client, dict(weights)) == expected(world, weights)


def test_a_stream_and_a_chat_have_it_too(client, world):
    weights = (("all", 0.3), ("qv", 0.7))
    extra = {"lora_mix": dict(weights), "ignore_eos": True, "return_token_ids": True}

    events = client.completions.create(
        model=BASE_NAME, prompt=PROMPT, stream=True, extra_body=extra, **GREEDY
    )

    tokens = [token for event in events for choice in event.choices for token in choice.token_ids]
    assert tokens == expected(world, weights)


def test_follows_a_part_that_is_loaded_again_and_none_that_is_gone(client, http, world):
    assert ask(client, {"qv": 0.7, "all": 0.3}) == expected(world, (("qv", 0.7), ("all", 0.3)))

    order = {"lora_name": "qv", "lora_path": "qv-again", "load_inplace": True}
    http.post("/v1/load_lora_adapter", json=order).raise_for_status()

    assert ask(client, {"all": 0.3, "qv": 0.7}) == expected(world, (("qv-again", 0.7), ("all", 0.3)))

    http.post("/v1/unload_lora_adapter", json={"lora_name": "qv"}).raise_for_status()

    answer = http.post("/v1/completions", json=body({"qv": 0.7, "all": 0.3}))
    assert answer.status_code == 404 and "`qv` does not exist" in answer.json()["error"]["message"]
    assert ask(client, {"all": 0.3}) == expected(world, (("all", 0.3),))


def body(lora_mix, model=BASE_NAME):
    return {"model": model, "prompt": PROMPT, "max_tokens": 2, "lora_mix": lora_mix}


# What a mix is refused for itself: test_mixes.py.
REFUSED = {
    "too many": ({f"a{i}": 1 for i in range(9)}, 400, "1 to 8 adapters, got 9"),
    "an unknown name": ({"qv": 1, "sql": 1}, 404, "`sql` does not exist"),
    "the base": ({"qv": 1, BASE_NAME: 1}, 400, "'tiny' in lora_mix is the base model"),
    "a weight in words": ({"qv": "much"}, 400, "lora_mix"),
    "a list": (["qv", 1], 400, "lora_mix"),
    "no model beside it but the base": ({"qv": 1}, 400, "give 'tiny' as model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_by_name(http, case):
    lora_mix, status, sentence = REFUSED[case]

    answer = http.post("/v1/completions", json=body(lora_mix, "qv" if "beside" in case else BASE_NAME))

    assert answer.status_code == status and sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_weight_that_is_no_number_is_refused(http, weight):
    text = f'{{"model": "tiny", "prompt": [5], "lora_mix": {{"qv": {weight}}}}}'

    answer = http.post("/v1/completions", content=text, headers={"content-type": "application/json"})

    assert answer.status_code == 400


def test_a_key_opens_a_mix_if_it_opens_the_base_and_each_part(server):
    def status(key, lora_mix):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/completions", json=body(lora_mix), headers=headers).status_code

    assert status("one", {"qv": 0.5}) == 403
    assert status("two", {"qv": 0.5, "all": 0.5}) == 403
    assert status("two", {"all": 0.5}) == 200


def test_metrics_are_by_the_mix(client, http):
    ask(client, {"qv": 0.25, "all": 0.5})

    assert 'minivllm:adapter_requests_total{adapter="all:0.5+qv:0.25"} 1.0' in http.get("/metrics").text
