"""The layer benchmark on a CPU: its cases, its file, its pictures."""

import functools
import json

import pytest
import torch

from benchmarks import layers
from benchmarks.impls import engine_linear
from benchmarks.layer_block import Block
from benchmarks.layer_cases import TABLE, Case, Linear, packed_linears

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--layers", "2"]
GROUPED = "test_bench_layers:grouped"


grouped = functools.partial(engine_linear, "grouped")


def without_adapters(w, a, b, slices, token_slots, ranks, phase):
    return lambda x: x @ w.t()


def broken(w, a, b, slices, token_slots, ranks, phase):
    raise RuntimeError("no such kernel")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "layers.json"
    impls = ["--impl", GROUPED, "--impl", "test_bench_layers:without_adapters"]
    impls += ["--impl", "test_bench_layers:broken"]
    cases = ["--case", "decode:6:3:8", "--case", "prefill:13:2:16"]
    layers.main([*TINY, *impls, *cases, "--mix", "ranks", "--json", str(path)])
    return path


def test_a_row_says_what_was_measured_and_how_long_it_took(measured):
    content = json.loads(measured.read_text())

    assert [row["case"] for row in content["rows"]] == ["decode:6:3:8", "prefill:13:2:16"]
    for row in content["rows"]:
        assert {"mix", "model", "slots_used", "floor_us", "base", GROUPED} <= row.keys()
        assert row["base"]["us"] > 0 and row[GROUPED]["us"] > 0
        assert row["floor_us"] > 0
    assert {"device", "torch", "triton", "python"} <= content["machine"].keys()


def test_the_error_tells_an_implementation_that_computes_lora_from_one_that_does_not(measured):
    for row in json.loads(measured.read_text())["rows"]:
        assert row["base"]["error"] < 1e-5
        assert row[GROUPED]["error"] < 1e-5
        assert row["test_bench_layers:without_adapters"]["error"] > 0.1


def test_an_implementation_that_fails_leaves_its_message_and_the_others_their_times(measured):
    for row in json.loads(measured.read_text())["rows"]:
        assert row["test_bench_layers:broken"]["error"] == "RuntimeError: no such kernel"


def test_a_picture_is_drawn_beside_the_file(measured):
    assert measured.with_suffix(".png").stat().st_size > 10_000


def test_every_row_has_a_slot_and_rows_of_a_prompt_have_the_same():
    slots = Case.parse("prefill:50:3:8").token_slots("uniform")

    assert len(slots) == 50 and slots.dtype == torch.int32
    assert slots.min() >= 0 and slots.max() < 3
    assert (slots.diff() != 0).sum() <= 5  # six prompts


def test_half_of_the_requests_are_base_requests_if_asked_for():
    slots = Case.parse("decode:40:4:8").token_slots("half")

    assert (slots == -1).sum() == 20


def test_popular_slots_come_first_in_a_zipf_mix():
    counts = Case.parse("decode:2000:8:8").token_slots("zipf").bincount(minlength=8)

    assert counts[0] > 2 * counts[3] > 2 * counts[7] > 0


def test_mixed_ranks_leave_zeros_past_the_live_rank():
    case = Case.parse("decode:4:3:32")

    linear = Linear.random(24, [8, 16], case.ranks("ranks"), case.rank, torch.empty(0))

    a = linear.a.view(3, 2, 32, 24)
    assert case.ranks("ranks") == [32, 16, 8]
    for slot, live in enumerate([32, 16, 8]):
        assert not a[slot, :, live:].any() and not linear.b[slot, :, live:].any()
        assert a[slot, :, :live].all() and linear.b[slot, :, :live].all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("benchmarks.impls:page", "benchmarks.impls has no 'page'; it has .*paged.*sgmv"),
        ("benchmarks.nothing:base", "No module named 'benchmarks.nothing'"),
    ],
)
def test_an_implementation_that_is_not_there_is_refused_with_those_that_are(spec, said):
    with pytest.raises(ValueError, match=said):
        layers.load_impl(spec)


def test_a_block_computes_the_same_whether_or_not_the_activation_adds_the_adapters():
    case = Case.parse("prefill:20:2:8")
    like = torch.empty(0)
    torch.manual_seed(0)
    made = {
        name: Linear.random(k, slices, case.ranks("uniform"), case.rank, like)
        for name, (k, slices) in packed_linears("tiny").items()
    }
    block, outputs = Block("tiny", case.tokens, like), []
    kept = block.residual.clone()

    for backend in ("grouped", "paged"):
        linears = {
            name: engine_linear(
                backend, one.w, one.a, one.b, one.slices, case.token_slots("half"), case.ranks("uniform")
            )
            for name, one in made.items()
        }
        block.residual.copy_(kept)
        outputs.append(block.around(linears)())

    assert torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    bare = {name: lambda x, w=one.w: x @ w.t() for name, one in made.items()}
    block.residual.copy_(kept)
    assert not torch.allclose(outputs[0], block.around(bare)(), rtol=1e-2, atol=1e-2)


def test_the_table_has_forty_cases_and_more_of_three_models():
    cases = [line.split() for line in TABLE]

    assert len(set(TABLE)) == len(TABLE) >= 40
    assert {model for *_, model in cases} == {"llama-8b", "qwen-0.6b", "llama-70b"}
    assert {mix for _, mix, _ in cases} == {"uniform", "zipf", "half", "ranks"}
    numbers = [Case.parse(text) for text, *_ in cases]
    assert (min(c.rank for c in numbers), max(c.rank for c in numbers)) == (8, 256)
    assert (min(c.slots for c in numbers), max(c.slots for c in numbers)) == (1, 128)
    assert (min(c.tokens for c in numbers), max(c.tokens for c in numbers)) == (1, 8192)
