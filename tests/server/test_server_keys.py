"""API keys: one that opens everything, and some that open one adapter each."""

import hmac
import shutil

import httpx
import pytest

from minivllm.server import keys
from minivllm.server.app import ROUTES as SERVED
from minivllm.server.settings import ServerSettings
from tests.worlds.servers import BASE_NAME, serving
from tests.worlds.waiting import PATIENCE

ASK = {"prompt": "x", "max_tokens": 1}
KEYS = {"api_keys": ("master", "master-2"), "adapter_keys": {"qv": "only-qv", "all": "only-all"}}


@pytest.fixture(scope="module")
def server(world, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("root"))
    with serving(world, "qv", "all", lora_root=root, allow_runtime_lora=True, **KEYS) as server:
        yield server


def client(server, key=None, scheme="Bearer"):
    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE)


def test_each_of_the_servers_keys_opens_every_model(server):
    for key in ("master", "master-2"):
        with client(server, key) as http:
            for model in (BASE_NAME, "qv", "all"):
                assert http.post("/v1/completions", json={"model": model, **ASK}).status_code == 200


def test_without_a_key_that_fits_nothing_is_answered(server):
    wrong = [None, "maste", "masterx", "master\t-", "MASTER", "only-q", "mäster"]
    routes = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]
    routes += [("GET", "/v1/adapters"), ("POST", "/v1/load_lora_adapter"), ("POST", "/tokenize")]
    routes += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere")]

    for key, (method, path) in [(key, routes[0]) for key in wrong] + [("wrong", route) for route in routes]:
        headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
        response = httpx.request(method, server.url + path, headers=headers)

        assert response.status_code == 401, (key, path)
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


def test_monitors_need_no_key(server):
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


# What a key of `qv` gets from each route of the server.
ROUTES = {
    ("POST", "/v1/completions"): (200, {"model": "qv", **ASK}),
    ("POST", "/v1/chat/completions"): (
        200,
        {"model": "qv", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    ),
    ("GET", "/v1/models"): (200, None),
    ("GET", "/v1/models/{name:model_name}"): (403, None),
    ("GET", "/v1/adapters"): (200, None),
    ("POST", "/v1/load_lora_adapter"): (403, {"lora_name": "qv", "lora_path": "secret"}),
    ("POST", "/v1/unload_lora_adapter"): (403, {"lora_name": "qv"}),
    ("POST", "/v1/pin_lora_adapter"): (403, {"lora_name": "qv"}),
    ("POST", "/v1/unpin_lora_adapter"): (403, {"lora_name": "qv"}),
    ("POST", "/tokenize"): (200, {"model": "qv", "prompt": "x"}),
    ("POST", "/detokenize"): (200, {"model": "qv", "tokens": [5]}),
    ("GET", "/health"): (200, None),
    ("GET", "/ping"): (200, None),
    ("GET", "/version"): (200, None),
    ("GET", "/metrics"): (403, None),
    ("GET", "/"): (200, None),
    ("GET", "/events"): (403, None),
}


@pytest.fixture
def tenants(world, tmp_path):
    """A server of `qv` and of two adapters that its holder must not hear of; the server's own client."""
    for name in ("secret-1", "secret-2"):
        shutil.copytree(world.path("all"), tmp_path / name)
    keys = {"api_keys": ("master",), "adapter_keys": {"qv": "only-qv", "secret-1": "only-secret-1"}}
    options = {"lora_root": str(tmp_path), "allow_runtime_lora": True, **keys}
    with serving(world, "qv", **options) as server, client(server, "master") as http:
        for name in ("secret-1", "secret-2"):
            loaded = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
            assert loaded.status_code == 200, loaded.text
            assert http.post("/v1/completions", json={"model": name, **ASK}).status_code == 200
        yield server, http


def test_no_route_tells_a_key_of_an_adapter_of_any_other(tenants):
    """Each route that the server has, so that a new one is thought of here."""
    server, _ = tenants
    methods = {(method, route.path) for route in SERVED for method in route.methods}
    assert methods - {("HEAD", path) for _, path in ROUTES} == set(ROUTES)

    with client(server, "only-qv") as http:
        for (method, path), (status, body) in ROUTES.items():
            asked = [path] if "{" not in path else [f"/v1/models/{name}" for name in ("secret-1", "nobody")]
            for each in asked:
                with http.stream(method, each, json=body) as response:  # that of /events would have no end
                    assert response.status_code == status, each
                    response.read()

                told = response.text.replace("secret-1", "", each.endswith("secret-1"))
                assert "secret" not in told, (each, response.text)


def test_no_refusal_tells_a_key_of_an_adapter_of_any_other(tenants):
    server, master = tenants
    for name in ("secret-1", "secret-2"):  # as many as there are slots
        assert master.post("/v1/pin_lora_adapter", json={"lora_name": name}).status_code == 200

    with client(server, "only-qv") as http:
        pinned = [
            http.post("/v1/completions", json={"model": "qv", "stream": stream, **ASK})
            for stream in (False, True)
        ]
        assert master.post("/v1/unload_lora_adapter", json={"lora_name": "qv"}).status_code == 200
        unknown = http.post("/v1/completions", json={"model": "qv", **ASK})

    for response in pinned:
        assert response.status_code == 409, response.text
        assert response.json()["error"]["message"] == (
            "adapter 'qv' needs a slot but all 2 are pinned for others; unpin one or raise max_loras"
        )
    assert unknown.status_code == 404
    assert "secret" not in unknown.text


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
