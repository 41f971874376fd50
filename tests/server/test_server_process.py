"""A server whose engine is in a process of its own: its responses while that runs and when it has died."""

import json
import os
import signal

import httpx
import pytest

from tests.worlds.processes import hold_after, process_id
from tests.worlds.servers import Answers, client_of, serving
from tests.worlds.waiting import PATIENCE

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(world):
    options = {"lora_root": str(world.folder), "allow_runtime_lora": True}
    with serving(world, "qv", in_a_process=True, **options) as server:
        yield server


def post(server, route, **body):
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=PATIENCE)


def adapters(server):
    found = httpx.get(f"{server.url}/v1/adapters", timeout=PATIENCE).json()["data"]
    return {adapter["name"]: adapter for adapter in found}


def test_adapters_are_loaded_pinned_and_unloaded_there(world, server):
    loaded = post(server, "load_lora_adapter", lora_name="all", lora_path="all")
    pinned = post(server, "pin_lora_adapter", lora_name="all")
    with client_of(server) as client:
        completion = client.completions.create(model="all", prompt="a fox", max_tokens=8, **GREEDY)
    known = adapters(server)["all"]
    unpinned = post(server, "unpin_lora_adapter", lora_name="all")
    unloaded = post(server, "unload_lora_adapter", lora_name="all")

    assert [r.status_code for r in (loaded, pinned, unpinned, unloaded)] == [200] * 4
    assert (known["state"], known["pinned"]) == ("in a slot", True) and known["bytes"] > 0
    assert completion.choices[0].text == Answers(world).text("all", "a fox")
    assert set(adapters(server)) == {"qv"}
    assert post(server, "completions", model="all", prompt="x").status_code == 404


def test_a_page_sees_steps_as_they_happen(server):
    with httpx.stream("GET", f"{server.url}/events", timeout=PATIENCE) as events:
        lines = (line.removeprefix("data: ") for line in events.iter_lines() if line.startswith("data: "))
        hello = json.loads(next(lines))["hello"]
        post(server, "completions", model="qv", prompt="seen", max_tokens=6, temperature=0, ignore_eos=True)
        steps = []
        while len(steps) < 6:
            steps += json.loads(next(lines))["steps"]

    assert hello["room"]["kv_blocks"] > 0 and "qv" in hello["adapters"]
    assert {row["adapter"] for step in steps for row in step["rows"]} == {"qv"}


def test_its_end_is_an_error_for_running_and_for_new_requests(world, tmp_path):
    body = {"model": "qv", "prompt": "long", "max_tokens": 120, "n": 8, "ignore_eos": True, "stream": True}
    with serving(world, "qv", in_a_process=True) as server:
        call = server.server.state.llm._client.call
        pid = call(process_id).result(PATIENCE)
        call(hold_after, 3, tmp_path / "never there").result(PATIENCE)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGKILL)
            events = [line for line in lines if line]
        health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
        refused = post(server, "completions", model="qv", prompt="x")
        listed = httpx.get(f"{server.url}/v1/adapters", timeout=PATIENCE)

    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["code"] == 503 and "killed by signal 9" in error["message"]
    assert [answer.status_code for answer in (health, refused, listed)] == [503] * 3
