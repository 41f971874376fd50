"""Adapters whose tensors a request brings, as a trainer's rollouts have them, against the same ones in folders."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, tokens_of

PROMPT = [5, 6, 7, 8, 9]


def tensors_of(world, name):
    return load_file(world.path(name) / "adapter_model.safetensors")


def in_memory(world, name, adapter_id=1, tensors=None, **changes):
    """Adapter `name` of the world as a request with tensors, called "policy"."""
    config = json.loads((world.path(name) / "adapter_config.json").read_text())
    fields = {"lora_tensors": tensors or tensors_of(world, name), "peft_config": config, **changes}
    return LoRARequest("policy", adapter_id, "unused", **fields)


def answer(engine, lora_request, request_id="r"):
    engine.add_request(request_id, PROMPT, greedy(8), lora_request=lora_request)
    return tokens_of(run(engine)[request_id])


def from_folder(world, name):
    return answer(world.engine(), LoRARequest(name, 1, str(world.path(name))))


@pytest.mark.parametrize("name", ["all", "patterns", "qv"])
def test_it_answers_as_the_same_adapter_in_a_folder(name, world):
    assert answer(world.engine(), in_memory(world, name)) == from_folder(world, name)


def test_the_config_may_be_what_peft_has_in_memory(world):
    """Sets and enums where JSON has lists and texts."""
    config = LoraConfig.from_pretrained(world.path("all")).to_dict()

    assert answer(world.engine(), in_memory(world, "all", peft_config=config)) == from_folder(world, "all")


def test_it_comes_back_after_an_eviction(world):
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    first = answer(engine, in_memory(world, "all"), "before")
    answer(engine, LoRARequest("other", 2, str(world.path("mlp"))), "other")
    assert engine.list_loras() == {2}

    engine.add_request("again", PROMPT, greedy(8), lora_request="policy")

    assert tokens_of(run(engine)["again"]) == first == from_folder(world, "all")


def test_other_tensors_are_another_adapter(world):
    engine = world.engine()
    first, second = in_memory(world, "all"), in_memory(world, "mlp")
    answer(engine, first)

    assert first != second and len({first, second}) == 2
    assert first == in_memory(world, "all", tensors=first.lora_tensors)
    with pytest.raises(ValueError, match="belongs to adapter 'policy'"):
        engine.add_request("r", PROMPT, greedy(8), lora_request=second)


def test_a_reload_brings_the_next_tensors_which_come_back_after_an_eviction(world):
    engine = world.engine(max_loras=1, max_cpu_loras=1)
    answer(engine, in_memory(world, "all"), "before")

    after = answer(engine, in_memory(world, "mlp", load_inplace=True), "after")
    answer(engine, LoRARequest("other", 2, str(world.path("all"))), "other")
    again = answer(engine, "policy", "again")

    assert after == again == from_folder(world, "mlp")


def test_a_trainer_may_write_to_its_tensors_while_they_are_loaded(world):
    """Also while another adapter has the slot: they come back into it from the engine's memory."""
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in tensors_of(world, "all").items()}
    engine = world.engine(max_loras=1)
    request = in_memory(world, "all", tensors=tensors)
    before = answer(engine, request, "before")

    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(3)
    answer(engine, world.request("mlp"), "other")

    assert answer(engine, request, "after") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_config": None}, "peft_config must be dicts"),
        ({"peft_config": {"r": 4}}, "Missing required configuration fields: lora_alpha, target_modules"),
        ({"lora_tensors": ["a"]}, "lora_tensors and peft_config must be dicts"),
        ({"lora_tensors": {}}, "holds no LoRA weights"),
        ({"lora_tensors": {"model.norm.weight": torch.ones(3)}}, "model.norm.weight is unsupported"),
        ({"lora_tensors": {str(i): torch.ones(3) for i in range(9999)}}, "9999 tensors, at most"),
    ],
)
def test_what_is_no_adapter_is_refused_in_a_sentence_that_names_it(changes, message, world):
    engine = world.engine()

    with pytest.raises(ValueError, match=f"adapter 'policy': .*{message}"):
        engine.add_request("r", PROMPT, greedy(8), lora_request=in_memory(world, "all", **changes))

    assert engine.list_loras() == set()
