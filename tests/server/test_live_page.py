"""The page of a server: what it is fed with, what it costs, and what can be done on it in a real browser."""

import json
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict

import httpx
import pytest

import minivllm
from minivllm.observe.page import build_page, run_of
from minivllm.server import run
from minivllm.server.live import latencies, message
from tests.tools.browser import SCREENS, Tab, open_browser
from tests.worlds.servers import BASE_NAME, Answers, held_up, serving
from tests.worlds.waiting import PATIENCE, wait_until

HOSTILE = "<img src=x onerror=alert(1)>"
ASK = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(world, tmp_path_factory):
    """A folder to load from: one adapter, and the same under another name."""
    folder = tmp_path_factory.mktemp("root")
    shutil.copytree(world.path("mlp"), folder / "mlp")
    shutil.copytree(world.path("mlp"), folder / HOSTILE)
    return folder


@pytest.fixture(scope="module")
def server(world, root):
    with serving(world, "qv", "all", "patterns", lora_root=str(root), allow_runtime_lora=True) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def tab(browser, server):
    tab = Tab(browser)
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#playground input[type=checkbox]")
    yield tab
    tab.page.close()


def ask(server, model, **more):
    body = {"model": model, "prompt": f"ask {model}", **ASK, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)


def listeners(server):
    """Pages that hear of steps. Beside them every engine has its recorder and its history."""
    return len(server.server.state.llm._client.engine.listeners) - 2


@contextmanager
def events_of(server, **headers):
    """The messages of /events, as they come."""

    def messages(response):
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    with httpx.stream("GET", f"{server.url}/events", headers=headers, timeout=PATIENCE) as response:
        assert response.status_code == 200, response.read()
        yield messages(response)


def test_the_first_message_says_what_there_is(server):
    ask(server, "qv")

    with events_of(server) as events:
        first = next(events)

    assert first["hello"]["model"] == BASE_NAME
    assert {"qv", "all", "patterns"} <= set(first["hello"]["adapters"])
    assert (first["hello"]["may_change"], first["hello"]["has_chat"]) == (True, True)
    assert first["hello"]["room"]["kv_blocks"] == 199
    last = server.server.state.llm._client.engine.trace.records[-1]
    assert first["steps"][-1] == json.loads(json.dumps(asdict(last)))


def test_each_step_is_sent_once_and_in_order(server):
    engine = server.server.state.llm._client.engine
    ask(server, "qv")  # or there are no steps yet to tell of at first
    with events_of(server) as events:
        told = next(events)["steps"]
        begun = engine.metrics.steps
        for model in ("qv", "all", BASE_NAME, "patterns"):
            assert ask(server, model).status_code == 200
        while told[-1]["step"] < engine.metrics.steps - 1:
            told += next(events)["steps"]

    numbers = [step["step"] for step in told]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and numbers[-1] > begun + 40
    kept = {record.step: json.loads(json.dumps(asdict(record))) for record in engine.trace.records}
    assert all(step == kept[step["step"]] for step in told)


def test_a_page_that_was_closed_costs_no_step_anything(server):
    wait_until(lambda: listeners(server) == 0)  # pages of other tests have gone

    with events_of(server) as events, events_of(server) as others:
        next(events), next(others)
        assert listeners(server) == 2

    wait_until(lambda: listeners(server) == 0)


def test_a_server_that_ends_does_not_wait_for_pages(world, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_TO_FLUSH", 10 * PATIENCE)  # uvicorn would wait for so long
    with serving(world, "qv") as server, events_of(server) as events:
        next(events)
        server.server.drain()
        assert list(events) == []
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()


def test_a_key_opens_the_events_and_none_is_needed_for_the_page(world):
    keys = {"api_keys": ("master",), "adapter_keys": {"qv": "only-qv"}}
    with serving(world, "qv", **keys) as server:
        page = httpx.get(server.url, timeout=PATIENCE)
        without = httpx.get(f"{server.url}/events", timeout=PATIENCE)
        of_one = httpx.get(
            f"{server.url}/events", headers={"authorization": "Bearer only-qv"}, timeout=PATIENCE
        )
        with events_of(server, authorization="Bearer master") as events:
            assert next(events)["hello"]["adapters"] == ["qv"]

    assert (page.status_code, without.status_code, of_one.status_code) == (200, 401, 403)
    assert "qv" not in page.text and "master" not in page.text


def test_the_page_may_not_be_framed_or_kept(server):
    headers = httpx.get(server.url, timeout=PATIENCE).headers

    assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
    assert "/events" not in httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()["paths"]


def test_no_name_breaks_its_event(server):
    hostile = "a\n\ndata: {}\n\n\r\u2028" + HOSTILE

    said = message(server.server.state.server, [], {"model": hostile})

    assert said.count("\n") == 2 and said.endswith("\n\n") and "\r" not in said
    assert json.loads(said.removeprefix("data: "))["hello"] == {"model": hostile}


def test_latencies_are_those_of_the_sorted_list():
    draw = random.Random(2)
    for count in (0, 1, 2, 3, 50, 1000):
        seconds = [draw.expovariate(3) for _ in range(count)]
        ordered = sorted(seconds)

        found = latencies(seconds)

        assert found["count"] == count
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            place = part * (count - 1)
            low = int(max(place, 0))
            wanted = None
            if count:
                above = ordered[min(low + 1, count - 1)]
                wanted = pytest.approx(ordered[low] + (above - ordered[low]) * (place - low))
            assert found[name] == wanted


# ---- in a browser ---------------------------------------------------------------------------------------------


def choose(tab, *models):
    for box in tab.page.locator("#playground input[type=checkbox]").all():
        wanted = box.get_attribute("value") in models
        if box.is_checked() != wanted:
            box.set_checked(wanted)


def test_the_playground_asks_base_and_adapters_in_one_batch(tab, server, world):
    choose(tab, BASE_NAME, "qv", "all")
    tab.page.fill("textarea", "Who are you?")
    tab.page.fill("input[type=number]", "9")
    steps = server.server.state.llm._client.engine.metrics.steps

    with held_up(server):  # until all have asked
        tab.page.click("#ask")
        wait_until(lambda: len(server.server.state.llm._open) == 3)
    tab.page.wait_for_selector("#ask:not([disabled])")

    cards = tab.page.locator(".answer")
    shown = dict(zip(cards.locator("b").all_text_contents(), cards.locator("pre").all_text_contents()))
    messages = [{"role": "user", "content": "Who are you?"}]
    answers = Answers(world)
    assert shown == {name: answers.chat(name, messages, 9) for name in (BASE_NAME, "qv", "all")}
    records = [r for r in server.server.state.llm._client.engine.trace.records if r.step >= steps]
    assert any({row.adapter for row in record.rows} >= {None, "qv", "all"} for record in records)
    assert tab.troubles == []


def test_the_first_screen_says_what_is_served_and_how_to_ask_for_it(tab, server):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(tab, "qv")
    tab.page.fill("textarea", "It's?")
    said = tab.page.inner_text("header")
    tab.page.click("#copy")
    tab.page.wait_for_selector("#copy:text('Copied')")
    command = tab.page.evaluate("navigator.clipboard.readText()")

    assert BASE_NAME in said and "3 adapters" in said and f"minivllm {minivllm.__version__}" in said
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert json.loads(ran.stdout)["model"] == "qv", ran
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"]
    tab.page.get_by_text("Python", exact=True).click()
    program = tab.page.inner_text("#program pre")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    for place in ("#playground", "#program", ".tiles"):
        assert tab.page.locator(place).bounding_box()["y"] < 700, place


def test_what_waits_says_so_and_may_be_clicked_while_answers_come(tab, server):
    """A browser has six connections to a server: four answers and the steps leave one."""
    models = tab.page.evaluate("live.models.length")
    assert models >= 4
    # The engine tells of its adapters, and is held up below.
    tab.page.locator("#adapters tr", has_text="patterns").wait_for()
    with held_up(server):
        tab.page.keyboard.press("Tab")
        tab.page.focus("textarea")
        tab.page.keyboard.press("Control+Enter")
        wait_until(lambda: len(server.server.state.llm._open) == 4)
        cards = tab.page.locator(".answer .soft").all_text_contents()
        tab.page.locator("#adapters tr", has_text="patterns").get_by_text("Pin", exact=True).click()
        tab.page.wait_for_selector("#adapters tr[aria-busy=true]")
        said = tab.page.inner_text("#adapters tr[aria-busy=true]")
        wait_until(lambda: tab.page.evaluate("live.pending.size") == 1)
    row = tab.page.locator("#adapters tr", has_text="patterns")
    row.get_by_text("Unpin").wait_for()
    row.get_by_text("Unpin").click()
    row.get_by_text("Pin", exact=True).wait_for()
    tab.page.wait_for_selector("#ask:not([disabled])")

    assert cards == ["waiting for its first token …"] * 4
    assert "pinning …" in said
    assert tab.troubles == []


def test_an_eviction_is_seen_as_it_happens(tab, server):
    for model in ("qv", "all", "patterns", "qv", "all"):
        assert ask(server, model).status_code == 200

    engine = server.server.state.llm._client.engine
    tab.until(f"page.trace.at(page.trace.length - 1)?.step === {engine.metrics.steps - 1}")
    evicted = [r.step for r in engine.trace.records if r.evictions]
    shown = tab.page.evaluate("page.trace.runs[0].steps.filter((s) => s.evictions.length).map((s) => s.step)")
    assert shown == evicted[-len(shown) :] and len(shown) >= 2
    tab.page.evaluate(f"page.go(page.trace.runs[0].steps.findIndex((s) => s.step === {evicted[-1]}))")
    assert "was evicted from slot" in tab.page.inner_text("#details")
    assert "[object" not in tab.page.inner_text("body")
    assert "to the first token" in tab.page.inner_text(".tiles")


def test_adapters_are_loaded_pinned_and_unloaded(tab, server):
    tab.page.fill("#load input >> nth=0", "mine")
    tab.page.fill("#load input >> nth=1", "mlp")
    tab.page.click("#load button")
    row = tab.page.locator("#adapters tr", has_text="mine")
    row.wait_for()
    assert ask(server, "mine").status_code == 200

    row.get_by_text("Pin", exact=True).click()
    row.get_by_text("Unpin").wait_for()
    assert "pinned" in row.inner_text()
    row.get_by_text("Unpin").click()
    row.get_by_text("Pin", exact=True).wait_for()
    row.get_by_text("Unload").click()
    row.wait_for(state="detached")

    assert ask(server, "mine").status_code == 404
    assert "Success: LoRA adapter 'mine' removed" in tab.page.inner_text("#adapters .said")
    tab.page.fill("#load input >> nth=1", "nowhere")
    tab.page.click("#load button")
    tab.page.wait_for_selector("#adapters .said.bad")
    assert "there is no adapter folder 'nowhere'" in tab.page.inner_text("#adapters .said")
    # The refusal itself is all that the browser complains of.
    assert all("404" in trouble for trouble in tab.troubles)


def test_a_hostile_adapter_is_a_text(tab, server):
    body = {"lora_name": HOSTILE, "lora_path": HOSTILE}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=PATIENCE).status_code == 200
    try:
        assert ask(server, HOSTILE).status_code == 200
        tab.until(f"page.trace.colours.has({json.dumps(HOSTILE)})")
        tab.page.reload()
        tab.page.locator("#adapters tr", has_text=HOSTILE).wait_for()
        choose(tab, HOSTILE)
        tab.page.click("#ask")
        tab.page.wait_for_selector("#ask:not([disabled])")

        for where in ("#charts", "#details", "#adapters", "#playground .answers"):
            assert HOSTILE in tab.page.inner_text(where), where
        assert tab.page.locator("img").count() == 0
        assert tab.troubles == []
    finally:
        httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": HOSTILE}, timeout=PATIENCE)


def test_a_hidden_page_listens_to_nothing_and_wakes_up_again(tab, server):
    wait_until(lambda: listeners(server) == 1)
    hide = "(is) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => is }); " + (
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )

    tab.page.evaluate(hide, True)
    wait_until(lambda: listeners(server) == 0)
    assert ask(server, "qv").status_code == 200
    time.sleep(2.5)  # longer than a page waits before it asks a lost server again
    assert listeners(server) == 0
    assert tab.page.inner_text("#head [role=status]") == "asleep"
    tab.page.evaluate(hide, False)

    wait_until(lambda: listeners(server) == 1)
    newest = server.server.state.llm._client.engine.metrics.steps - 1
    tab.until(f"page.trace.at(page.trace.length - 1)?.step === {newest}")


def test_a_page_without_the_key_asks_for_it(browser, world):
    with serving(world, "qv", api_keys=("master",)) as server:
        tab = Tab(browser, width=400)
        tab.page.goto(server.url)
        tab.page.fill("input[type=password]", "master")
        tab.page.click("text=Use this key")

        tab.page.wait_for_selector("#playground input[type=checkbox]")
        assert tab.page.locator("#adapters tr", has_text="qv").inner_text()
        assert "authorization: Bearer $API_KEY" in tab.page.inner_text("#program pre")
        tab.page.close()


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_nothing_of_the_live_page_is_cut_off(browser, server, width, dark):
    tab = Tab(browser, width, dark)
    tab.page.goto(server.url)
    tab.page.locator("#adapters tr", has_text="patterns").wait_for()
    ask(server, "qv")
    tab.until("page.trace.length > 3")
    tab.drawn()

    assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    tab.page.close()


def test_the_oldest_steps_of_a_long_day_are_let_go(browser, tmp_path):
    tab = Tab(browser)
    steps = [{"step": i, "rows": []} for i in range(1000)]
    tab.page.goto("about:blank")
    html = build_page("x", [run_of("live", [])], scripts=["live.js"], live=True)
    tab.open(html, tmp_path)

    gone = [
        tab.page.evaluate("(steps) => page.trace.extend(steps)", part) for part in (steps[:500], steps[400:])
    ]

    assert gone == [0, 400]
    numbers = tab.page.evaluate("page.trace.runs[0].steps.map((step) => step.step)")
    assert numbers == list(range(400, 1000))
    tab.page.evaluate("page.trace.extend([{ step: 3, rows: [] }])")  # a server that was started anew
    assert tab.page.evaluate("page.trace.length") == 1
    tab.page.close()
