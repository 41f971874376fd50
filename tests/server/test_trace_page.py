"""The page of a trace: it is one file, it holds what it is given, and it says so in a real browser."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from minivllm.commands.trace_page import run_trace_page
from minivllm.observe.page import build_page, run_of
from minivllm.observe.palette import adapter_colours
from minivllm.observe.recorder import room
from minivllm.observe.trace import SlotEvent, StepRecord, TraceRow, TraceSkip
from tests.tools.browser import SCREENS, Tab, open_browser
from tests.worlds.engines import greedy, run, tiny_world

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two slots and four adapters: loads, evictions, somebody passed over."""
    world = tiny_world(tmp_path_factory)
    engine = world.engine(max_num_batched_tokens=16, max_cpu_loras=3)
    for number, name in enumerate([*world.names, None, *world.names]):
        prompt = {"prompt_token_ids": [3 + number, 7, 11, 5, 2 + number]}
        engine.add_request(f"r{number}", prompt, greedy(3 + number), lora_request=world.request(name))
    run(engine)
    return engine


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser, engine, tmp_path_factory):
    html = build_page("Steps", [run_of("run", engine.trace.records, room(engine))])
    return Tab(browser).open(html, tmp_path_factory.mktemp("page"))


def hostile_records() -> list[StepRecord]:
    """Every text that a page shows is hostile."""
    step = StepRecord(
        0,
        0.0,
        rows=[TraceRow(f"r{HOSTILE}", HOSTILE, 0, 3, "prefill")],
        slots=[HOSTILE],
        loads=[HOSTILE],
        activations=[SlotEvent(HOSTILE, 0)],
        skipped=[TraceSkip(f"w{HOSTILE}", HOSTILE, HOSTILE)],
        waiting=[f"w{HOSTILE}"],
        preempted=[HOSTILE],
        running=1,
    )
    return [step]


class Elements(HTMLParser):
    """Counts the elements of a page, and keeps what they refer to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.links = Counter(), []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.links += [value for name, value in attributes if name in ("src", "href")]


def embedded(html: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])


def test_a_page_refers_to_nothing_outside_itself(engine):
    html = build_page("Steps", [run_of("run", engine.trace.records)])

    assert Elements(html).links == ["data:,"]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", re.sub(r"(?m)^\s*//.*$", "", html))


def test_a_page_holds_the_records_as_they_are(engine, tmp_path):
    html = build_page("Steps", [run_of("run", engine.trace.records)])

    engine.trace.write_jsonl(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text("utf-8").splitlines()]
    assert embedded(html)["runs"][0]["steps"] == lines


def test_no_name_ends_the_element_it_stands_in():
    plain = build_page("Steps", [run_of("run", [StepRecord(0, 0.0, slots=["sql"])])])
    html = build_page(HOSTILE, [run_of(HOSTILE, hostile_records())], notes=[HOSTILE])

    assert Elements(html).tags == Elements(plain).tags
    assert embedded(html)["runs"][0]["steps"][0]["slots"] == [HOSTILE]


def test_a_hostile_name_is_text_in_a_browser(browser, tmp_path):
    html = build_page(HOSTILE, [run_of(HOSTILE, hostile_records())], notes=[HOSTILE])

    tab = Tab(browser).open(html, tmp_path)

    shown = tab.page.inner_text("#details")
    assert f"{HOSTILE} was read from disk" in shown.replace("\n", "")
    assert f"r{HOSTILE}" in shown and f"w{HOSTILE}" in shown
    assert tab.page.locator("img").count() == 0
    assert tab.troubles == []


def test_the_page_counts_as_the_trace_does(tab, engine):
    counts = tab.page.evaluate("page.trace.counts()")

    summary = engine.trace.summary()
    names = ("steps", "requests", "adapters", "tokens", "loads", "evictions", "preemptions")
    assert counts == {name: summary[name] for name in names} | {"times passed over": summary["skips"]}
    assert min(counts[name] for name in ("loads", "evictions", "times passed over")) > 0


def test_each_step_shows_its_rows_and_the_queue(tab, engine):
    for column, record in enumerate(engine.trace.records):
        tab.page.evaluate(f"page.go({column})")

        cells = tab.page.locator("#details tr td:first-child").all_inner_texts()
        assert cells == [row.request for row in record.rows], column
        said = tab.page.inner_text("#details")
        assert all(name in said for name in record.waiting), column
        assert said.count("no slot is free") == sum(s.reason == "max_loras" for s in record.skipped), column
        assert said.count("was evicted from slot") == len(record.evictions), column


def test_tokens_a_second_are_those_of_the_last_eight_steps(tab, engine):
    records = engine.trace.records
    for column in range(len(records) - 1):
        first = max(0, column - 7)
        seconds = records[column + 1].time_s - records[first].time_s
        tokens = Counter()
        for record in records[first : column + 1]:
            for row in record.rows:
                tokens[row.adapter] += row.tokens

        rates = dict(tab.page.evaluate(f"[...page.trace.rates({column})]"))

        assert rates == pytest.approx({name: count / seconds for name, count in tokens.items()}), column


def test_a_slot_has_the_colour_of_the_adapter_in_it(tab, engine):
    records, colours = engine.trace.records, adapter_colours(engine.trace.adapters)
    tab.page.evaluate("page.go(page.trace.length - 1)")
    tab.drawn()

    for column, record in enumerate(records[:-1]):
        for slot, adapter in enumerate(record.slots):
            if any(row.slot == slot for row in record.rows):
                middle = (column + 0.5) / len(records)
                found = tab.pixel(0, middle, (slot + 0.85) / len(record.slots))
                assert found == list(bytes.fromhex(colours[adapter][1:])), (column, slot)


def test_steps_are_walked_through_by_keys_and_by_a_click(tab, engine):
    tab.page.evaluate("page.go(3)")
    tab.page.locator("h1").click()

    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("page.column") == 4
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("page.column") == 3
    box = tab.page.locator("canvas").first.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 5)
    assert tab.page.evaluate("page.column") == len(engine.trace) - 1
    assert tab.troubles == []


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_nothing_is_cut_off(browser, engine, tmp_path, width, dark):
    records = [*engine.trace.records, *hostile_records()]

    tab = Tab(browser, width, dark).open(build_page("Steps " * 30, [run_of("run", records)]), tmp_path)

    for column in (0, len(records) - 1):
        tab.page.evaluate(f"page.go({column})")
        tab.drawn()
        assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    assert tab.troubles == []


def test_the_command_takes_lines_and_the_demos_report(engine, tmp_path):
    engine.trace.write_jsonl(tmp_path / "trace.jsonl")
    lines = (tmp_path / "trace.jsonl").read_text("utf-8").splitlines()
    report = {"steps": [json.loads(line) for line in lines], "room": room(engine)}
    (tmp_path / "demo.json").write_text(json.dumps(report))

    run_trace_page(tmp_path / "trace.jsonl", tmp_path / "lines.html")
    run_trace_page(tmp_path / "demo.json", tmp_path / "demo.html")

    of_lines = embedded((tmp_path / "lines.html").read_text("utf-8"))["runs"][0]
    of_demo = embedded((tmp_path / "demo.html").read_text("utf-8"))["runs"][0]
    assert of_lines["steps"] == of_demo["steps"] == report["steps"]
    assert (of_lines["room"], of_demo["room"]) == ({}, room(engine))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no step"), ("no trace", "line 1 of"), ('{"steps": [{"step": 1}]}', "no step records")],
    ids=["empty", "text", "half a record"],
)
def test_the_command_refuses_what_is_no_trace(tmp_path, text, said):
    (tmp_path / "file").write_text(text)

    with pytest.raises(ValueError, match=said):
        run_trace_page(tmp_path / "file", tmp_path / "page.html")

    assert not (tmp_path / "page.html").exists()


def test_records_say_how_full_memory_and_cache_are(engine):
    records, full = engine.trace.records, room(engine)

    held = set()
    for record in records:
        held = (held | set(record.loads)) - set(record.drops)
        assert record.in_memory == len(held) <= full["adapters"] == 3
    assert any(record.drops for record in records)
    assert all(0 < record.kv_blocks <= full["kv_blocks"] == 199 for record in records)
