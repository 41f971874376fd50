"""The engine benchmarks from end to end on a tiny model and a CPU. How long things take is nobody's business here."""

import json

import pytest
from safetensors.torch import load_file

from benchmarks import engine
from benchmarks.adapters import DISTINCT, write_adapters
from benchmarks.arguments import SHAPES
from benchmarks.options import model_folder
from minivllm import EngineArgs
from minivllm.models.registry import MODELS

WEIGHTS = "adapter_model.safetensors"
TINY = ["--model", "tiny", "--device", "cpu", "--rank", "4", "--max-model-len", "64"]
DECODE = ["decode", *TINY, "--prompt-tokens", "6", "--output-tokens", "5", "--repeats", "2"]
SUMMARY = {
    *("tokens_per_second", "step_ms", "prefill_ms", "prompt_steps_ms"),
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
}


@pytest.fixture(scope="module")
def decode_file(tmp_path_factory):
    """Measured in two pieces."""
    path = tmp_path_factory.mktemp("decode") / "decode.json"
    engine.main([*DECODE, "--requests", "1,3", "--cases", "base,none,1", "--json", str(path)])
    engine.main([*DECODE, "--requests", "1,3", "--cases", "3", "--json", str(path)])
    return path


@pytest.mark.nightly
def test_decode_measures_every_case_that_has_a_request_for_each_adapter(decode_file):
    rows = json.loads(decode_file.read_text())["rows"]

    assert [(row["case"], row["requests"], row["slots"]) for row in rows] == [
        ("base", 1, 0),
        ("base", 3, 0),
        ("none", 1, 8),
        ("none", 3, 8),
        ("1", 1, 8),
        ("1", 3, 8),
        ("3", 3, 8),
    ]
    for row in rows:
        assert row.keys() >= SUMMARY
        assert all(row[name] > 0 for name in SUMMARY)
        assert len(row["passes"]) == 2 and 0 <= row["outside_runner_share"] <= 1


def test_the_file_says_where_when_and_how(decode_file):
    content = json.loads(decode_file.read_text())

    assert content["benchmark"] == "engine-decode"
    assert {"device", "torch", "triton", "python", "cuda"} <= content["machine"].keys()
    assert content["options"]["output_tokens"] == 5 and content["options"]["model"] == "tiny"
    assert content["date"]


def test_a_picture_is_drawn_beside_the_file(decode_file):
    assert decode_file.with_suffix(".png").stat().st_size > 10_000


def test_rows_measured_with_other_options_do_not_go_into_one_file(decode_file):
    before = decode_file.read_text()

    with pytest.raises(ValueError, match="another options"):
        engine.main([*DECODE, "--repeats", "1", "--cases", "base", "--json", str(decode_file)])

    assert decode_file.read_text() == before


def test_serve_gives_both_engines_the_same_traffic_and_counts_what_slots_cost(tmp_path):
    path = tmp_path / "serve.json"
    lengths = ["--prompt-max", "20", "--output-median", "6", "--output-max", "10"]
    traffic = ["--num-requests", "24", "--rate", "400", "--adapters", "5", "--slots", "2", "--alpha", "0.3"]

    engine.main(["serve", *TINY, *lengths, *traffic, "--json", str(path)])

    base, lora = json.loads(path.read_text())["rows"]
    assert (base["case"], lora["case"]) == ("base", "lora")
    assert base["requests"] == lora["requests"] == 24
    assert base["tokens_per_second"] * base["seconds"] == pytest.approx(
        lora["tokens_per_second"] * lora["seconds"]
    )
    assert base["activations"] == base["evictions"] == 0
    assert lora["activations"] >= lora["evictions"] > 0 == lora["loads"]  # all were loaded before the traffic
    for row in (base, lora):
        assert row["ttft_quantiles_ms"] == sorted(row["ttft_quantiles_ms"])
        assert len(row["ttft_quantiles_ms"]) == len(row["itl_quantiles_ms"]) == 101
        assert row["ttft_quantiles_ms"][0] > 0
        assert row["ttft_quantiles_ms"][50] == pytest.approx(row["ttft_p50_ms"])
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_switch_measures_the_copy_alone_and_in_a_step(tmp_path):
    path = tmp_path / "switch.json"
    sizes = ["--switches", "3", "--running", "3", "--prompt-tokens", "5", "--slots", "2", "--adapters", "3"]

    engine.main(["switch", *TINY[:-1], "128", *sizes, "--json", str(path)])

    switch, steps = json.loads(path.read_text())["rows"]
    assert 0 < switch["call_ms"] <= switch["complete_ms"] and len(switch["samples_ms"]) == 3
    assert switch["bytes"] > 0
    # Steps alone, with a copy beside them, with a newcomer whose adapter has a slot, and with one whose adapter needs
    # one; and what these two wait for their first token.
    kinds = {"decode", "copy", "arrival", "switch", "arrival_ttft", "switch_ttft"}
    assert steps["samples_ms"].keys() == kinds
    assert all(len(samples) >= 3 for samples in steps["samples_ms"].values())
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_adapters_are_folders_of_their_own_with_few_distinct_files_of_weights(tmp_path):
    requests = write_adapters(tmp_path, model_folder("tiny"), count=6, rank=4)

    files = [tmp_path / request.lora_name / WEIGHTS for request in requests]
    assert [request.lora_int_id for request in requests] == [1, 2, 3, 4, 5, 6]
    assert len({file.parent.resolve() for file in files}) == 6
    assert len({file.stat().st_ino for file in files}) == DISTINCT
    first, second = load_file(files[0]), load_file(files[1])
    assert len(first) == 2 * 7 * 2  # A and B of seven linears in two layers
    assert all(tensor.any() and not tensor.equal(second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("shape", sorted(path.name for path in SHAPES.iterdir()))
def test_a_shape_is_a_model_that_the_engine_knows(shape):
    config = EngineArgs(model_folder(shape), load_format="dummy").create_engine_config()

    assert config.model_config.architecture.architecture in MODELS
