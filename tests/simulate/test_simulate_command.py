"""`minivllm simulate`: tables, JSON, a page, policies of one's own, and the cost of a step from results."""

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.fit import Measured, assumption, fit, fit_steps, main, steps_of_serve
from minivllm.cli import app
from minivllm.commands import simulate_cli
from minivllm.policies import keeping, prefetching, routing, scheduling
from minivllm.simulate.cost_model import CostModel, StepWork, graph_sizes
from minivllm.simulate.page import build_page

SMALL = ["simulate", "--requests", "60", "--rate", "20", "--adapters", "12", "--max-loras", "3"]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

# What a newcomer writes to see a policy of her own in the report.
NEWCOMERS = '''"""The adapter that most requests wait for goes first."""

from minivllm.policies import scheduling
from minivllm.policies.scheduling import BoundedOvertaking


def few_wait(scheduler, request):
    """0 for the adapter that most wait for, nearly 1 for one that a single request waits for."""
    waiting = len(scheduler.waiting.of_adapters([request.adapter_id]))
    return 1 - waiting / len(scheduler.waiting)


scheduling.POLICIES["crowd-first"] = lambda ranks: BoundedOvertaking(few_wait)
'''


def simulate(*arguments):
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_same_seed_says_the_same_to_the_byte():
    arguments = ["--times", "bursts", "--adapter-mix", "bursts", "--turns", "3", "--json"]

    first, again, other = (simulate(*arguments, "--seed", seed) for seed in ("4", "4", "5"))

    assert first == again != other


def test_a_newcomers_policy_is_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setitem(scheduling.POLICIES, "crowd-first", None)  # gone again after the test
    own = tmp_path / "crowd.py"
    own.write_text(NEWCOMERS)
    arguments = ["--max-num-seqs", "2", "--json"]

    report = json.loads(
        simulate(*arguments, "--policy-file", str(own), "--scheduling-policy", "fcfs,crowd-first")
    )

    assert len(NEWCOMERS.splitlines()) <= 30
    assert [row["scheduling_policy"] for row in report["rows"]] == ["fcfs", "crowd-first"]
    assert report["rows"][0]["ttft_p50_ms"] != report["rows"][1]["ttft_p50_ms"]


def test_the_page_holds_everything_itself(tmp_path):
    page = tmp_path / "page.html"

    simulate("--prefetch", "none,arrival", "--replicas", "2", "--routing", "hashing", "--page", str(page))

    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "<script" not in text
    assert text.count("<tr>") == 3 and "none" in text and "arrival" in text


def test_the_page_marks_the_best_and_all_that_is_written_like_it():
    row = {"ttft_p50_ms": 74.6, "jain": 0.9921, "copies": 9}
    others = (
        {"ttft_p50_ms": 75.4, "jain": 0.9924, "copies": 8},
        {"ttft_p50_ms": 80.0, "jain": 0.5, "copies": 8},
    )
    rows = [
        one | {"ttft_p99_ms": 99.0, "tokens_per_second": 5.0, "memory_hits": 0.5} for one in (row, *others)
    ]
    columns = {"TTFT": ("ttft_p50_ms", "{:.0f}"), "Jain": ("jain", "{:.3f}"), "copies": ("copies", "{:.0f}")}
    columns["p99"] = ("ttft_p99_ms", "{:.0f}")

    page = build_page({"options": {}, "cost_model": "x", "rows": rows}, ["a", "b", "c"], columns)

    assert re.findall(r'class="best">(\S+?)<', page) == ["75", "0.992", "75", "0.992", "8", "8"]  # and no p99


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--eviction-policy", "fifo"],
            "there is no policy 'fifo' for --eviction-policy; known are lru, lfu",
        ),
        (["--times", "daily"], "there is no 'daily' for --times; known are trace, poisson"),
        (["--adapter-mix", "x"], "there is no 'x' for --adapter-mix; known are zipf"),
        (["--trace", "x"], "there is no trace 'x'"),
    ],
)
def test_what_there_is_not_is_said_with_what_there_is(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate(*arguments)


def test_the_options_name_all_policies():
    text = Path(simulate_cli.__file__).read_text()

    for policies in (keeping, scheduling, prefetching, routing):
        assert ", ".join(policies.POLICIES) in text


def test_a_fit_finds_what_a_step_costs():
    rng = np.random.default_rng(2)
    truth = CostModel({"steps": 0.006, "tokens": 8e-6, "context": 4e-8, "adapters": 3e-5})
    works = [StepWork(*rng.uniform(0, 100, len(StepWork._fields))) for _ in range(80)]
    copies = rng.integers(0, 3, 80).tolist()
    measured = [Measured(w, c, truth.step_seconds(w) + 0.02 * c) for w, c in zip(works, copies)]

    found, copy_s, *_ = fit_steps(measured)

    expected = dict.fromkeys(StepWork._fields, 0.0) | truth.step
    assert {name: found.get(name, 0.0) for name in expected} == pytest.approx(expected, rel=1e-2, abs=3e-9)
    assert copy_s == pytest.approx(0.02, rel=1e-2)
    assert fit_steps(measured, {"tokens": 8e-6}).step["tokens"] == 8e-6


def test_a_fit_says_the_mean_of_what_was_measured():
    rng = np.random.default_rng(3)
    measured = [Measured(StepWork(steps=1), 0, seconds) for seconds in rng.lognormal(-4, 0.5, 400)]

    found, *_ = fit_steps(measured)

    assert found["steps"] == pytest.approx(np.mean([one.seconds for one in measured]), rel=1e-3)


BROUGHT = Path(simulate_cli.__file__).parents[1] / "simulate" / "costs" / "h100-llama-8b.json"


def test_no_step_of_more_prompt_tokens_costs_much_less():
    """From 193 tokens on: with adapters in pages, a graph of 192 tokens takes longer than one of 224."""
    cost = CostModel.load(BROUGHT)

    for lora in (0, 1):
        steps = [
            StepWork(steps=1, prompt_steps=1, requests=1, tokens=n, lora=lora) for n in range(193, 9000, 7)
        ]
        seconds = [cost.step_seconds(step) for step in steps]
        assert seconds == sorted(seconds)


def test_a_step_in_a_graph_that_is_gone_is_not_fitted_to():
    row = json.loads((RESULTS / "engine-serve-base-16-h100-2026-11-22.json").read_text())["rows"][0]
    today = row | {"engine": row["engine"] | {"graph_sizes": graph_sizes()}}

    of_before, of_today = ({one.work.tokens for one in steps_of_serve(said)} for said in (row, today))

    # There was a graph of 448 tokens, and one of 896.
    gone = {n for n in of_today if 384 < n <= 448 or 768 < n <= 896}
    assert gone and not gone & of_before
    assert {n for n in of_today - gone if 256 < n <= 512} <= of_before


def test_the_package_brings_what_the_results_say(tmp_path):
    kept = CostModel.load(BROUGHT)
    results = [RESULTS / f"{name}.json" for name in re.findall(r"(\S+) \(NVIDIA H100", kept.source)]
    out = tmp_path / "cost.json"

    main([*map(str, results), "-o", str(out)])

    assert len(results) > 5
    fitted = CostModel.load(out)
    assert fitted.step == pytest.approx(kept.step) and fitted.source == kept.source
    decode = json.loads((RESULTS / "engine-decode-ahead-h100-2026-11-22.json").read_text())
    (base,) = (row for row in decode["rows"] if (row["case"], row["requests"]) == ("base", 128))
    context = 128 * (decode["options"]["prompt_tokens"] + decode["options"]["output_tokens"] / 2)
    work = StepWork(steps=1, requests=128, tokens=128, context=context, pairs=context / 1000)
    assert kept.step_seconds(work) == pytest.approx(base["step_ms"] / 1e3, rel=0.05)


def test_what_is_no_result_is_refused(tmp_path):
    other = RESULTS / "layers-peers-h100-2026-11-21.json"
    with pytest.raises(ValueError, match="has no steps to fit to"):
        main([str(other)])
    with pytest.raises(ValueError, match="is no cost model"):
        CostModel.load(other)


@pytest.mark.parametrize(
    "options",
    [["--pages", "99999999999"], ["--turns", "1e308"], ["--price", "inf"], ["--policy-file", "."]],
    ids=" ".join,
)
def test_what_nobody_can_simulate_is_refused_by_its_option(options):
    refused = CliRunner().invoke(app, [*SMALL, *options])

    assert refused.exit_code == 2
    assert f"Invalid value for '{options[0]}'" in refused.output


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"benchmark": "engine-switch"}', '{"benchmark": "trust"}'])
def test_a_file_that_is_no_result_is_named(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"result\.json' has no steps to fit to; give results of"):
        fit([path])


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "", "4 ns"])
def test_assumptions_are_seconds(seconds):
    with pytest.raises(ArgumentTypeError, match=f"'{seconds}' is not a number of at least 0"):
        assumption(f"context={seconds}")
    with pytest.raises(ArgumentTypeError, match="'contxt=1' is not of the form context=4e-8"):
        assumption("contxt=1")
