"""Adapters that come and go over HTTP while requests are in flight."""

import asyncio
import math
import shutil
import socket
import threading
import time
from functools import partial
from urllib.parse import quote

import httpx
import pytest

from minivllm.server.context import Server
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from minivllm.sources.resolver import FilesystemResolver, LoRAResolverRegistry
from tests.worlds.servers import (
    BASE_NAME,
    GREEDY,
    Answers,
    client_of,
    order,
    served,
    serving,
    text_of,
)
from tests.worlds.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def answers(world):
    return Answers(world)


@pytest.fixture
def root(world, tmp_path):
    """A folder with two of the four adapters."""
    for name in ("mlp", "patterns"):
        shutil.copytree(world.path(name), tmp_path / "root" / name)
    return tmp_path / "root"


@pytest.fixture
def server(world, root):
    LoRAResolverRegistry.register_resolver("root", FilesystemResolver(root, [str(world.base)]))
    with serving(world, "qv", "all", lora_root=str(root), allow_runtime_lora=True) as server:
        yield server
    LoRAResolverRegistry.resolvers.pop("root")


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def adapters(http):
    return {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}


def test_a_loaded_adapter_answers_under_its_name_until_it_is_unloaded(http, client, answers, root):
    loaded = order(http, "load", "fresh", root / "mlp")
    answer = text_of(client, "fresh")
    listed = "fresh" in [card.id for card in client.models.list()]
    unloaded = order(http, "unload", "fresh")
    after = http.post("/v1/completions", json={"model": "fresh", "prompt": "x"})

    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'fresh' added successfully.")
    assert answer == answers.text("mlp", "a tale")
    assert listed
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'fresh' removed successfully.",
    )
    assert after.status_code == 404


def test_a_path_may_begin_at_the_root(http, client, answers):
    order(http, "load", "short", "patterns").raise_for_status()

    assert text_of(client, "short") == answers.text("patterns", "a tale")


def test_an_unknown_name_is_found_below_the_root_and_known_from_then_on(http, client, answers):
    before = list(adapters(http))
    answer = text_of(client, "mlp")

    assert answer == answers.text("mlp", "a tale")
    assert before == ["all", "qv"]
    assert list(adapters(http)) == ["all", "mlp", "qv"]


REFUSED = [
    ("qv", "mlp", 400, "already been loaded"),
    (BASE_NAME, "mlp", 400, "base model's name"),
    ("new", "..", 400, "--lora-root"),
    ("new", "/etc", 400, "--lora-root"),
    ("new", "mlp/../../outside", 400, "--lora-root"),
    ("new", "nul\0l", 400, "--lora-root"),
    ("new", "a-link", 400, "--lora-root"),
    ("new", "a-file-is-a-link", 400, "--lora-root"),
    ("new", "nowhere", 404, "no adapter folder"),
    ("new", "broken", 400, "adapter_model.safetensors"),
    ("new", "empty", 404, "adapter_config.json"),
    ("", "mlp", 400, "lora_name"),
    ("a line\n", "mlp", 400, "'a line\\n'"),
    ("../mlp\n", "mlp", 400, "cannot be printed"),
    ("nul\0l", "mlp", 400, "cannot be printed"),
    ("new", "", 400, "lora_path"),
]


def test_what_cannot_be_loaded_is_refused_and_nothing_changes(http, world, root):
    shutil.copytree(world.path("qv"), root.parent / "outside")
    (root / "a-link").symlink_to(root.parent / "outside")
    shutil.copytree(root / "mlp", root / "a-file-is-a-link")
    (root / "a-file-is-a-link" / "adapter_model.safetensors").unlink()
    (root / "a-file-is-a-link" / "adapter_model.safetensors").symlink_to(
        root.parent / "outside" / "adapter_model.safetensors"
    )
    shutil.copytree(root / "mlp", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    (root / "empty").mkdir()
    before = adapters(http)

    for name, path, status, words in REFUSED:
        response = order(http, "load", name, path)

        assert response.status_code == status, (name, path, response.text)
        assert words in response.json()["error"]["message"], (name, path)
        assert adapters(http) == before, (name, path)


def test_a_name_leads_to_no_file_outside_of_the_root(http, world, root):
    shutil.copytree(root / "mlp", root / "leak")
    (root / "leak" / "adapter_model.safetensors").unlink()
    (root / "leak" / "adapter_model.safetensors").symlink_to(world.path("mlp") / "adapter_model.safetensors")

    response = http.post("/v1/completions", json={"model": "leak", "prompt": "x"})

    assert response.status_code == 400
    assert "--lora-root" in response.json()["error"]["message"]


def test_a_folder_beside_the_root_is_not_below_it_for_how_its_name_begins(http, root):
    beside = shutil.copytree(root / "mlp", root.with_name(root.name + "-of-others"))
    (root / "link").symlink_to(beside)

    response = order(http, "load", "link", "link")

    assert response.status_code == 400
    assert "--lora-root" in response.json()["error"]["message"]


# Each of these once led to the folder of `mlp`, or might tell that it does.
OTHER_NAMES = [
    "../root/mlp",
    "../../{above}/root/mlp",
    "../../nowhere/root/mlp",
    "../" * 60 + "{from_top}/mlp",
    "{root}/mlp",
    "./mlp",
    "mlp/.",
    "mlp/",
    "patterns/../mlp",
    "//mlp",
    "..\\root\\mlp",
    "mlp\t",
    "mlp\n",
    "all\n",
    "mlp\0",
    "x" * 1000,
    "x/" * 500 + "mlp",
]


def test_an_adapter_below_the_root_has_one_name_and_no_answer_tells_where_the_root_lies(http, root):
    before, above, from_top = adapters(http), root.parent.name, str(root)[1:]
    for name in OTHER_NAMES:
        name = name.format(above=above, from_top=from_top, root=root)
        responses = [http.post("/v1/completions", json={"model": name, "prompt": "x"})]
        responses.append(http.get(f"/v1/models/{quote(name, safe='')}"))

        assert [response.status_code for response in responses] == [404, 404], name
        for response in responses:
            message = response.json()["error"]["message"]
            assert message == f"The model `{name[:100]}` does not exist; there are: tiny, all, qv"
        assert adapters(http) == before, name


class Steps:
    """Of an engine: it takes `left` more, and then only hears calls."""

    def __init__(self, engine):
        self.left, self._step = math.inf, engine.step

    def __call__(self, **options):
        if not self.left:
            time.sleep(0.001)
            return []
        self.left -= 1
        return self._step(**options)


@pytest.fixture
def steps(server, monkeypatch):
    engine = server.server.state.llm._client.engine
    monkeypatch.setattr(engine, "step", Steps(engine))
    return engine.step


class Orders:
    """Orders that are sent one after the other and wait beside each other. answers: number of an order -> response"""

    def __init__(self, server, http):
        self.http, self.answers, self._threads = http, {}, []
        self._locks = server.server.state.server.names._locks

    def send(self, what, name, path=None, **more):
        number = len(self._threads)

        def ask():
            self.answers[number] = order(self.http, what, name, path, **more)

        self._threads.append(threading.Thread(target=ask))
        waiting = self.waiting(name)
        self._threads[-1].start()
        wait_until(lambda: self.waiting(name) != waiting)

    def waiting(self, name):
        """How many changes of a name are under way or wait for their turn."""
        lock = self._locks.get(name)
        return 0 if lock is None else lock.locked() + len(lock._waiters or ())

    def wait(self):
        """The statuses, in the order in which they were sent."""
        for thread in self._threads:
            thread.join(PATIENCE)
        return [self.answers[number].status_code for number in range(len(self._threads))]


@pytest.fixture
def busy(http, client, steps):
    """A stream of the adapter `busy`, in the middle; it goes on when somebody calls this, who gets its text."""
    order(http, "load", "busy", "mlp").raise_for_status()
    steps.left = 3
    asked = {**GREEDY, "max_tokens": 100}
    stream = client.completions.create(model="busy", prompt="bye", stream=True, **asked)
    begun = next(iter(stream)).choices[0].text

    def rest():
        steps.left = math.inf
        return begun + "".join(chunk.choices[0].text for chunk in stream)

    return rest


def test_an_unload_is_answered_when_it_is_done(server, http, busy, answers):
    orders = Orders(server, http)
    orders.send("unload", "busy")
    too_soon = dict(orders.answers)
    meanwhile = [http.post("/v1/completions", json={"model": "busy", "prompt": "x"})]
    meanwhile += [http.get("/v1/models/busy"), http.get("/v1/models")]
    text = busy()

    assert orders.wait() == [200] and not too_soon
    assert orders.answers[0].text == "Success: LoRA adapter 'busy' removed successfully."
    assert text == answers.text("mlp", "bye", 100)
    assert [response.status_code for response in meanwhile] == [404, 404, 200]
    assert "busy" not in {model["id"] for model in meanwhile[2].json()["data"]}
    assert "busy" not in adapters(http)


def test_other_changes_wait_for_an_unload_and_then_find_no_adapter(server, http, busy):
    orders = Orders(server, http)
    for what in ("unload", "unload", "pin", "unload"):
        orders.send(what, "busy")
    too_soon = dict(orders.answers)
    at_once = order(http, "unpin", "busy")
    busy()

    assert orders.wait() == [200, 404, 404, 404] and not too_soon
    for response in (at_once, *(orders.answers[number] for number in (1, 2, 3))):
        assert response.json()["error"]["message"] == "The lora adapter 'busy' cannot be found."


def test_an_unload_goes_on_without_the_client_that_ordered_it(server, http, client, busy, answers):
    orders = Orders(server, http)
    body = b'{"lora_name": "busy"}'
    with socket.create_connection(server.socket.getsockname()) as sock:
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        sock.sendall(b"POST /v1/unload_lora_adapter HTTP/1.1\r\nhost: x\r\n" + head + body)
        wait_until(lambda: orders.waiting("busy"))

    orders.send("load", "busy", "patterns")
    busy()

    assert orders.wait() == [200]
    assert text_of(client, "busy") == answers.text("patterns", "a tale")


def test_an_unload_of_a_server_that_ends_is_answered(world, root, monkeypatch):
    with serving(world, "qv", lora_root=str(root), allow_runtime_lora=True, drain_seconds=0.1) as server:
        engine = server.server.state.llm._client.engine
        monkeypatch.setattr(engine, "step", Steps(engine))
        engine.step.left = 3
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            body = {"model": "qv", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                orders = Orders(server, http)
                orders.send("unload", "qv")
                orders.send("load", "qv", "mlp")
                server.server.drain()
                events = [line for line in lines if line]
            server._thread.join(PATIENCE)

            assert not server._thread.is_alive()
            assert orders.wait() == [503, 503]
    assert events[-1] == "data: [DONE]" and '"code":503' in events[-2]


def test_a_request_that_is_on_its_way_brings_no_unloaded_adapter_back(server, http):
    order(http, "load", "temporary", "mlp").raise_for_status()
    llm = server.server.state.llm
    held, let_go = threading.Event(), threading.Event()
    wait = partial(let_go.wait, PATIENCE)
    holder = threading.Thread(
        target=lambda: asyncio.run(llm.run_in_tokenizer_thread(lambda: (held.set(), wait())))
    )
    holder.start()
    assert held.wait(PATIENCE)
    late = []
    body = {"model": "temporary", "prompt": "is read after the unload"}
    asking = threading.Thread(target=lambda: late.append(http.post("/v1/completions", json=body)))
    asking.start()
    wait_until(lambda: not llm._tokenizing._executor._work_queue.empty())

    gone = order(http, "unload", "temporary")
    let_go.set()
    asking.join()
    holder.join()

    assert (gone.status_code, late[0].status_code) == (200, 404)
    assert "temporary" not in llm._client.engine.adapters.by_name
    order(http, "load", "temporary", "patterns").raise_for_status()


def test_more_pins_than_slots_are_refused(http, client):
    order(http, "pin", "qv").raise_for_status()
    order(http, "pin", "all").raise_for_status()
    text_of(client, "qv")

    refused = order(http, "pin", "nobody"), order(http, "unload", "nobody"), order(http, "load", "m", "mlp")
    text_of(client, "qv")
    third = order(http, "pin", "m")

    assert [response.status_code for response in refused] == [404, 404, 200]
    assert third.status_code == 409
    assert "all 2 slots are pinned" in third.json()["error"]["message"]


def test_adapters_are_described(http, client):
    text_of(client, "qv")

    found = adapters(http)["qv"]
    assert found["bytes"] > 0
    assert found["last_used"] > 1e9
    assert (found["pinned"], found["state"]) == (False, "in a slot")
    assert set(found) == {"name", "path", "state", "slot", "pinned", "bytes", "last_used", "version"}


def test_nothing_changes_where_that_is_not_allowed(world):
    with serving(world, "qv") as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        responses = [order(http, "load", "x", world.path("all"))]
        responses += [order(http, what, "qv") for what in ("unload", "pin", "unpin")]

        assert [response.status_code for response in responses] == [403] * 4
        assert "--allow-runtime-lora" in responses[0].json()["error"]["message"]
        assert list(adapters(http)) == ["qv"]


def test_adapters_of_the_start_that_do_not_fit_are_all_told_of_at_once(world):
    """Else somebody raises --max-lora-rank for the first, and for the second after another start."""
    llm = AsyncLLM.from_engine(world.engine(max_lora_rank=1))
    settings = ServerSettings(BASE_NAME, adapters=served(world, "qv", "all"))
    try:
        with pytest.raises(ValueError, match=r"'qv'.*max_lora_rank.*; .*'all'.*max_lora_rank"):
            asyncio.run(Server.of(llm, settings).start())
    finally:
        llm.shutdown()
