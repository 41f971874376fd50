"""What an engine has measured over time: passes by batch size, memory, refusals; and what it says of itself."""

import json
import logging

import pytest
import torch

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run
from tests.worlds.small import MODULES, SmallWorld

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def world(tmp_path):
    return SmallWorld(tmp_path)


def passes(engine):
    """Rows of a batch -> how many passes."""
    return {rows: told["steps"] for rows, told in engine.debug_info()["forward_by_rows"].items()}


def test_passes_are_counted_by_their_rows(world):
    engine = world.engine()
    for number, max_tokens in enumerate((3, 3, 5)):
        engine.add_request(str(number), PROMPT, greedy(max_tokens))
    run(engine)

    told = engine.debug_info()["forward_by_rows"]

    assert passes(engine) == {1: 2, 3: 3}
    seconds = sum(of_size["seconds"] for of_size in told.values())
    assert seconds == pytest.approx(engine.get_metrics()["forward_seconds"])


def test_a_pass_that_breaks_off_is_not_counted_and_the_next_one_is(world):
    engine = world.engine()
    engine.add_request("a", PROMPT, greedy(3))
    with engine.runner.model.register_forward_pre_hook(lambda *_: 1 / 0):
        assert run(engine)["a"].error

    engine.add_request("b", PROMPT, greedy(4))
    run(engine)

    assert passes(engine) == {1: 4}


def test_memory_over_time_has_the_bytes_of_blocks_and_adapters(world):
    engine = world.engine()
    engine.add_lora(world.request(1))
    engine.add_request("a", PROMPT, greedy(2))
    engine.step()

    [sample] = engine.debug_info()["memory_over_time"]

    info = engine.debug_info()
    block = info["kv_bytes"] // info["kv_blocks"]
    blocks = -(-(len(PROMPT) + 1) // engine.config.cache_config.block_size)
    assert sample["kv_cache"] in (block * (blocks - 1), block * blocks) and sample["kv_cache"]
    assert sample["adapters"] == info["memory"]["cpu_total"]
    assert info["peak_memory"]["kv_cache"] == sample["kv_cache"]
    assert info["peak_memory"]["adapters"] == sample["adapters"]
    assert info["peak_memory"]["process"] > 50 * 2**20


def test_the_peak_of_blocks_stays_when_they_are_free(world):
    engine = world.engine(enable_prefix_caching=False)
    engine.add_request("a", PROMPT * 5, greedy(8))
    run(engine)
    most = engine.debug_info()["peak_memory"]["kv_cache"]
    engine.add_request("b", PROMPT, greedy(2))
    run(engine)

    block = engine.runner.kv_block_bytes
    assert engine.debug_info()["peak_memory"]["kv_cache"] == most
    assert most >= block * -(-len(PROMPT) * 5 // engine.config.cache_config.block_size)


def test_refusals_and_failures_are_counted_and_the_last_are_named(world, tmp_path):
    engine = world.engine()
    for number in range(40):
        with pytest.raises(FileNotFoundError):
            engine.add_lora(LoRARequest(f"gone{number}", 50 + number, str(tmp_path / "nothing")))

    errors = engine.debug_info()["errors"]

    assert (errors["adapters_refused"], errors["requests_failed"]) == (40, 0)
    assert len(errors["recent"]) == 32
    assert errors["recent"][-1]["adapter_id"] == 89
    assert errors["recent"][-1]["reason"].startswith("adapter 'gone39': ")


def test_it_tells_the_machine_the_model_and_the_configuration_as_plain_values(world):
    engine = world.engine(max_loras=2)

    info = json.loads(json.dumps(engine.debug_info()))

    assert info["system"]["pytorch_version"] == torch.__version__
    assert info["system"]["gpu_count"] == torch.cuda.device_count()
    assert info["model"]["architecture"] == "LlamaForCausalLM"
    assert info["model"]["num_hidden_layers"] == 2
    assert (info["lora"]["max_loras"], info["lora"]["lora_dtype"]) == (
        2,
        str(engine.config.model_config.dtype),
    )


def test_a_new_engine_says_what_it_is(world, caplog):
    caplog.set_level(logging.INFO, "minivllm")

    engine = world.engine(max_loras=2, max_lora_rank=8)

    base, lora = [record.getMessage() for record in caplog.records]
    assert base.startswith(f"engine of '{world.folder / 'base'}' (LlamaForCausalLM, ")
    assert f"{engine.runner.num_blocks} KV blocks of " in base
    wrapped = len(engine.runner.lora_manager.manager.modules)
    assert lora.startswith(f"LoRA: {wrapped} modules are wrapped; 2 slots of rank 8, 4 adapters in memory")


def test_a_model_has_all_its_parameters_though_linears_are_packed_on_a_cpu(world):
    linears = {name: k * n for name, (k, n) in MODULES.items()}
    head = linears.pop("lm_head")
    norms = 32 * (2 * 2 + 1)

    info = world.engine(dtype="float32").debug_info()["model"]

    assert info["parameters"] == 2 * sum(linears.values()) + 2 * head + norms  # embedding and head
