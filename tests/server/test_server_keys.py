"""API keys: one that opens everything, and some that open one adapter each."""

import hmac

import httpx
import pytest
from patience import PATIENCE
from tiny_engine import tiny_world
from tiny_server import BASE_NAME, serving

from minivllm.server import keys
from minivllm.server.settings import ServerSettings

ASK = {"prompt": "x", "max_tokens": 1}
KEYS = {"api_keys": ("master", "master-2"), "adapter_keys": {"qv": "only-qv", "all": "only-all"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture(scope="module")
def server(world, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("root"))
    with serving(world, "qv", "all", lora_root=root, allow_runtime_lora=True, **KEYS) as server:
        yield server


def client(server, key=None, scheme="Bearer"):
    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("key", ["master", "master-2"])
@pytest.mark.parametrize("model", [BASE_NAME, "qv", "all"])
def test_the_servers_keys_open_every_model(server, key, model):
    assert client(server, key).post("/v1/completions", json={"model": model, **ASK}).status_code == 200


@pytest.mark.parametrize("key", [None, "maste", "masterx", "master\t-", "MASTER", "only-q", "mäster"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")),
        *(("GET", "/v1/adapters"), ("POST", "/v1/load_lora_adapter"), ("POST", "/tokenize")),
        *(("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere")),
    ],
)
def test_without_a_key_that_fits_nothing_is_answered(server, key, method, path):
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}

    response = httpx.request(method, server.url + path, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "AuthenticationError"


def test_another_scheme_and_two_headers_are_no_key(server):
    basic = client(server, "master", scheme="Basic").get("/v1/models")
    twice = httpx.get(
        f"{server.url}/v1/models",
        headers=[("authorization", "Bearer wrong"), ("authorization", "Bearer master")],
        timeout=PATIENCE,
    )

    assert (basic.status_code, twice.status_code) == (401, 401)


def test_who_watches_the_server_needs_no_key(server):
    assert client(server).get("/health").status_code == 200
    assert client(server).get("/version").status_code == 200


def test_a_key_of_an_adapter_opens_that_adapter_alone(server):
    with client(server, "only-qv") as http:
        answers = {
            model: http.post("/v1/completions", json={"model": model, **ASK}).status_code
            for model in (BASE_NAME, "qv", "all", "nobody")
        }
        tokens = http.post("/tokenize", json={"model": "all", "prompt": "x"}).status_code
        listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
        described = [each["name"] for each in http.get("/v1/adapters").json()["data"]]
        change = http.post("/v1/unload_lora_adapter", json={"lora_name": "qv"}).status_code

    assert answers == {BASE_NAME: 403, "qv": 200, "all": 403, "nobody": 403}
    assert (tokens, listed, described, change) == (403, ["qv"], ["qv"], 403)


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch):
    compared, really = [], hmac.compare_digest

    def compare(sent, digest):
        compared.append(len(sent))
        return really(sent, digest)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    of_all = keys.Keys(ServerSettings("m", **KEYS))
    for sent in ("Bearer master", "Bearer only-all", "Bearer " + "x" * 5000, ""):
        compared.clear()
        of_all.holder(sent)

        assert compared == [32] * 4


def test_keys_that_open_nothing_are_refused():
    with pytest.raises(ValueError, match="--api-key"):
        ServerSettings("m", adapter_keys={"a": "k"})
    with pytest.raises(ValueError, match="empty"):
        ServerSettings("m", api_keys=("",))


@pytest.mark.parametrize("key", ["ключ", "7q9\n", " 7q9", "7q9\x7f", "\ud800"], ids=ascii)
def test_keys_that_no_header_brings_are_refused_and_not_shown(key):
    for settings in ({"api_keys": (key,)}, {"api_keys": ("k",), "adapter_keys": {"a": key}}):
        with pytest.raises(ValueError, match="no header can hold this API key") as refusal:
            ServerSettings("m", **settings)

        assert key.strip() not in str(refusal.value)


def test_settings_do_not_show_their_keys():
    assert "master" not in repr(ServerSettings("m", **KEYS))
