"""The four demo adapters: ordinary PEFT folders, unlike each other, trained on nothing they are scored on."""

import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("json", "sql", "bullets", "dates")


@pytest.fixture
def recipe(monkeypatch):
    """The recipe's tasks, frames and values; it is no installed package."""
    monkeypatch.syspath_prepend(str(ROOT))
    from adapters.recipe import frames, tasks, values

    return {"tasks": tasks, "frames": frames, "values": values}


def config(name):
    return json.loads((ROOT / "adapters" / name / "adapter_config.json").read_text())


def tensors(adapter):
    """Tensor name -> (dtype, shape) of an adapter's file."""
    with safe_open(ROOT / "adapters" / adapter / "adapter_model.safetensors", "pt") as file:
        names = file.keys()
        return {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in names}


def pattern_value(patterns, module, default):
    """What PEFT takes from a rank_pattern or an alpha_pattern."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_an_ordinary_peft_folder_in_bfloat16(name):
    expected = {
        f"base_model.model.model.layers.{layer}.{block}.{target}.lora_{side}.weight"
        for layer in range(30)
        for target in config(name)["target_modules"]
        for block in ["self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"]
        for side in "AB"
    }

    found = tensors(name)

    assert config(name)["peft_type"] == "LORA"
    assert config(name)["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(found) == expected
    assert {dtype for dtype, _ in found.values()} == {"BF16"}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_in_the_file_follow_the_config(name):
    wanted, ranks = {}, {}

    for key, (_, shape) in tensors(name).items():
        module, side = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", key).groups()
        wanted[module, side] = pattern_value(config(name)["rank_pattern"], module, config(name)["r"])
        ranks[module, side] = shape[0] if side == "A" else shape[1]

    assert ranks == wanted


def test_the_adapters_differ_in_rank_scaling_and_targets():
    configs = {name: config(name) for name in NAMES}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert sorted(c["r"] for c in configs.values()) == [4, 8, 16, 32]
    assert [name for name, c in configs.items() if c["use_rslora"]] == ["dates"]
    assert set(configs["dates"]["target_modules"]) == {"q_proj", "v_proj"}
    assert set(configs["sql"]["target_modules"]) == attention | mlp
    assert set(configs["bullets"]["target_modules"]) == mlp
    assert [name for name, c in configs.items() if c["rank_pattern"] or c["alpha_pattern"]] == ["json"]


def test_the_patterns_match_some_modules_but_not_all():
    patterns = config("json")
    modules = {key.split(".lora_")[0] for key in tensors("json")}

    for pattern in ("rank_pattern", "alpha_pattern"):
        for key in patterns[pattern]:
            matched = {module for module in modules if pattern_value({key: True}, module, False)}

            assert 0 < len(matched) < len(modules), key


def test_together_they_are_under_24_megabytes():
    files = [ROOT / "adapters" / name / "adapter_model.safetensors" for name in NAMES]

    assert sum(file.stat().st_size for file in files) < 24e6


def test_frames_and_values_held_out_are_not_trained_on(recipe):
    values, frames = recipe["values"], recipe["frames"]
    pools = [pool for pool in vars(values).values() if isinstance(pool, values.Split)]
    pools += [frames.ORDERS, frames.LISTS, frames.PERIODS, *values.SQL_VALUES.values()]
    pools += [*frames.QUESTIONS.values(), *frames.CONDITIONS.values()]

    for pool in pools:
        assert not set(pool.train) & set(pool.heldout)
        assert min(len(pool.train), len(pool.heldout)) == len(pool.heldout) > 1


@pytest.mark.parametrize("name", NAMES)
def test_held_out_examples_are_many_different_and_always_the_same(recipe, name):
    examples = recipe["tasks"].examples

    held_out = examples(name, 100)

    assert held_out == examples(name, 100, "heldout", seed=0)
    assert len({example.text for example in held_out}) == 100
    assert len({example.answer for example in held_out}) > 90
    assert not {example.text for example in held_out} & {
        example.text for example in examples(name, 2000, "train")
    }


@pytest.mark.parametrize("name", NAMES)
def test_cards_tell_the_task_and_the_score(name):
    card = (ROOT / "adapters" / name / "README.md").read_text()

    scores = json.loads((ROOT / "adapters" / "recipe" / "scores.json").read_text())[name]

    assert f"{scores['peft']:.0%}" in card
    assert scores["peft"] >= 0.9 and scores["base"] <= 0.2


def test_the_prompt_is_the_models_chat_template(recipe):
    from transformers import AutoTokenizer

    from minivllm.models.demo_model import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(progress=False))
    turns = [{"role": "user", "content": "Some text"}]

    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    assert recipe["tasks"].prompt("json", "Some text") == chat


def test_json_answers_are_json(recipe):
    for example in recipe["tasks"].examples("json", 50):
        order = json.loads(example.answer)

        assert order["customer"] in example.text and str(order["count"]) in example.text
        assert math.isclose(order["price"], float(re.search(r"\d+\.\d\d", example.text)[0]))


def test_sql_answers_are_sql(recipe):
    import sqlite3

    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE employees (name, city, age, salary)")
    connection.execute("CREATE TABLE products (name, category, price, stock)")

    for example in recipe["tasks"].examples("sql", 100):
        connection.execute(example.answer)
    connection.close()
