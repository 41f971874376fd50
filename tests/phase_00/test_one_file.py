"""The whole idea in one file: its tokens are PEFT's and the engine's, over adapters that take turns in two slots."""

import importlib

import pytest

from minivllm import LLM, LoRARequest, SamplingParams
from tests.worlds.demo import NAMES, ROOT, DemoOracle, adapter_folder, demo_base, task_prompts

NUM_TOKENS = 12
FILE = ROOT / "phases" / "00_one_file" / "multilora.py"


@pytest.fixture(scope="module")
def one_file():
    demo_base()  # the file looks for the model where this puts it
    return importlib.import_module("phases.00_one_file.multilora")


@pytest.fixture(scope="module")
def oracle():
    return DemoOracle(demo_base(), NUM_TOKENS)


@pytest.fixture(scope="module")
def pairs():
    """Eight (adapter, prompt): one of each adapter's task, four for base."""
    return task_prompts(1)


@pytest.fixture(scope="module")
def served(one_file, oracle, pairs):
    """The engine of the file, and its answers: requests, and of each step the slots and whose rows it had."""
    engine, steps = one_file.Engine(slots=2, max_requests=5), []
    requests = [
        one_file.Request(oracle.tokenizer(prompt)["input_ids"], adapter, NUM_TOKENS)
        for adapter, prompt in pairs
    ]
    engine.waiting.extend(requests)
    while engine.waiting or engine.running:
        engine.step()
        steps.append((dict(engine.slots.slot_of), {request.adapter for request, _ in engine.batch.requests}))
    return engine, requests, steps


def test_every_token_is_the_one_that_transformers_and_peft_pick(served, oracle, pairs):
    _, requests, _ = served

    for request, (adapter, prompt) in zip(requests, pairs):
        likeliest, lead = oracle.likeliest(adapter, prompt, request.answer)
        assert request.answer == likeliest, f"{adapter}: differs by {max(lead):.2g} in a logit"
    assert len({tuple(request.answer) for request in requests}) == len(requests)


@pytest.mark.nightly
def test_the_engine_says_the_same(served, pairs):
    _, requests, _ = served
    llm = LLM(demo_base(), dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=32, warm_up=False)
    loras = [
        name and LoRARequest(name, NAMES.index(name) + 1, str(adapter_folder(name))) for name, _ in pairs
    ]

    outputs = llm.generate(
        [prompt for _, prompt in pairs],
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
        lora_request=loras,
        use_tqdm=False,
    )

    assert [output.outputs[0].token_ids for output in outputs] == [request.answer for request in requests]


def test_two_slots_were_enough_because_adapters_took_turns_in_them(served):
    engine, _, steps = served

    assert engine.slots.loads >= len(NAMES)
    for slots, served_in_it in steps:
        adapters = served_in_it - {None}
        assert len(adapters) <= 2 and adapters <= set(slots), "a row whose adapter is in no slot"
        assert sorted(slots.values()) == list(range(len(slots)))
    assert any(None in served_in_it and len(served_in_it) == 3 for _, served_in_it in steps), (
        "base and two adapters in one pass"
    )


def test_an_adapter_of_a_step_never_gives_way_to_another_of_it(one_file):
    """Slots against a list in order of use: a bug here answers with another adapter's weights."""
    layers = {}
    slots = one_file.Slots(layers, count=2)

    assert slots.activate("json", {"json", "sql"}) != slots.activate("sql", {"json", "sql"})
    where = slots.activate("json", {"json"})  # sql is now the one used longest ago
    assert slots.activate("dates", {"dates", "json"}) != where
    assert list(slots.slot_of) == ["json", "dates"]
    assert slots.activate("sql", {"sql", "json"}) != where, "json is needed, though it was used longer ago"
    assert list(slots.slot_of) == ["json", "sql"]


def test_a_request_that_is_passed_over_does_not_hold_up_those_behind_it(one_file):
    engine = object.__new__(one_file.Engine)
    engine.slots, engine.max_requests = one_file.Slots({}, count=1), 4
    names = ["json", "sql", None, "json"]
    requests = [one_file.Request([1], name) for name in names]
    engine.waiting, engine.running = one_file.deque(requests), []

    engine.schedule()

    assert [request.adapter for request in engine.running] == ["json", None, "json"]
    assert list(engine.waiting) == [requests[1]]


def test_it_is_one_file_of_three_hundred_lines_that_knows_nothing_of_the_engine():
    text = FILE.read_text()

    assert len(text.splitlines()) <= 300
    assert "import minivllm" not in text and "from minivllm" not in text
