"""An update while requests run: who keeps which weights, whose keys and values those are, and what a refusal leaves."""

import json
import random

import pytest
import torch

from minivllm.versions.weights import token_versions
from tests.worlds.hunts import greedy, run, tokens_of
from tests.worlds.small import write_adapter
from tests.worlds.versioned import PROMPT, VersionedWorld

pytestmark = pytest.mark.lab("13.2")


@pytest.fixture
def world(tmp_path):
    return VersionedWorld(tmp_path)


@pytest.fixture
def engine(world):
    return world.engine(max_loras=3, max_cpu_loras=6)


def begin(world, engine, request_id="r", steps=3, **options):
    """A request of the newest version that has run for some steps, and so has as many tokens."""
    world.ask_for(
        engine, request_id, "policy" if "policy" in engine.adapters.by_name else world.policy(), **options
    )
    for _ in range(steps):
        engine.step()


def test_with_finish_a_request_ends_with_the_weights_that_it_began_with(world, engine):
    begin(world, engine)

    assert world.update(engine, 1) == 1, "the number of the new version"
    output = run(engine)["r"]

    assert output.lora_version == 0
    world.check(output, [0] * 6)


def test_requests_of_three_versions_run_beside_each_other(world, engine):
    for version in range(3):
        if version:
            world.update(engine, version)
        begin(world, engine, str(version), steps=1, tokens=9)

    assert len(engine.adapters.manager.list_active_adapters()) == 3
    outputs = run(engine)
    for version in range(3):
        world.check(outputs[str(version)], [version] * 9)


def test_after_a_restart_no_key_or_value_of_old_weights_is_left(world, engine):
    """Its tokens are kept, and it says whose they are."""
    begin(world, engine)
    before = list(engine.scheduler.requests["r"].output_token_ids)

    world.update(engine, 1, running="restart")
    output = run(engine)["r"]

    assert tokens_of(output)[:3] == before
    assert output.lora_version == 1
    assert token_versions(output.lora_request, 6) == [0, 0, 0, 1, 1, 1]
    world.check(output, [0] * 3 + [1] * 3)


def test_requests_of_all_versions_before_are_restarted(world, engine):
    begin(world, engine, "oldest", steps=2, tokens=9)
    world.update(engine, 1)
    begin(world, engine, "older", steps=2, tokens=9)
    world.update(engine, 2)
    begin(world, engine, "old", steps=2, tokens=9)

    world.update(engine, 3, running="restart")
    outputs = run(engine)

    world.check(outputs["oldest"], [0] * 6 + [3] * 3)
    world.check(outputs["older"], [1] * 4 + [3] * 5)
    world.check(outputs["old"], [2] * 2 + [3] * 7)
    assert len(engine.adapters.adapters) == 1, "old versions are left behind"


def test_a_request_that_waits_for_its_turn_is_restarted_without_a_history(world):
    engine = world.engine(max_num_seqs=1)
    begin(world, engine, "runs", steps=2)
    world.ask_for(engine, "waits", "policy")
    engine.step()

    world.update(engine, 1, running="restart")
    outputs = run(engine)

    assert token_versions(outputs["waits"].lora_request, 6) == [1] * 6
    world.check(outputs["waits"], [1] * 6)
    world.check(outputs["runs"], [0] * 3 + [1] * 3)


def test_weights_of_another_rank_come_with_their_config(world, engine):
    begin(world, engine)
    write_adapter(world.folder_of(1), seed=101, rank=2, alpha=5)
    config = json.loads((world.folder_of(1) / "adapter_config.json").read_text())

    world.update(engine, 1, peft_config=config, running="restart")

    world.check(run(engine)["r"], [0] * 3 + [1] * 3)


def test_versions_that_are_gone_are_not_kept_in_mind(world, engine):
    begin(world, engine)
    for version in range(1, 5):
        run(engine)
        world.update(engine, version)

    [older] = engine.adapters._older.values()
    assert len(older) == 1, "a list that grows with every update"


def test_requests_of_others_go_on(world, engine):
    other = world.adapter(3)
    engine.add_request("base", PROMPT, greedy(9), lora_request=None)
    engine.add_request("other", PROMPT, greedy(9), lora_request=other)
    begin(world, engine)
    running = list(engine.scheduler.running)

    world.update(engine, 1, running="restart")

    assert [request.request_id for request in engine.scheduler.running] == [
        request.request_id for request in running if request.request_id != "r"
    ]
    outputs = run(engine)
    assert tokens_of(outputs["base"]) == world.answer(None, PROMPT, 9)
    assert tokens_of(outputs["other"]) == world.answer(other, PROMPT, 9)


def test_a_prompt_that_is_half_computed_has_logprobs_of_the_new_weights_alone(world):
    engine = world.engine(max_num_batched_tokens=6, max_num_seqs=2)
    begin(world, engine, steps=2, prompt_logprobs=0)
    assert not engine.scheduler.requests["r"].output_token_ids

    world.update(engine, 1, running="restart")
    output = run(engine)["r"]

    told = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    ours = torch.tensor([entry[token].logprob for entry, token in told], dtype=torch.float64)
    assert (ours - world.logprobs(1, PROMPT)).abs().max() < 1e-9
    world.check(output, [1] * 6)


def test_logprobs_of_a_prompt_stay_with_the_tokens_that_follow_it(world, engine):
    begin(world, engine, prompt_logprobs=0)
    told = list(engine.scheduler.requests["r"].prompt_logprobs)

    world.update(engine, 1, running="restart")

    assert run(engine)["r"].prompt_logprobs == told


def test_a_version_goes_with_its_last_request(world, engine):
    begin(world, engine)
    world.update(engine, 1)
    assert len(engine.adapters.adapters) == 2

    run(engine)

    assert [record.request.version for record in engine.adapters.adapters.values()] == [1]
    assert list(engine.adapters.manager.list_adapters()) == list(engine.adapters.adapters)
    world.update(engine, 2)
    assert len(engine.adapters.adapters) == 1, "a version that nobody uses is left"


@pytest.mark.parametrize("running", ["finish", "restart"])
def test_no_block_of_another_version_is_found(world, engine, running):
    begin(world, engine, tokens=4)
    run(engine)
    world.update(engine, 1, running=running)

    begin(world, engine, "again", tokens=4)
    first = run(engine)["again"]
    begin(world, engine, "once more", tokens=4)
    second = run(engine)["once more"]

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    world.check(first, [1] * 4)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("bad weights", {}),
        ("a lower number", {"version": 1}),
        ("a word that nobody knows", {"running": "drop"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_has_changed_nothing(world, engine, case, options):
    begin(world, engine, "oldest", steps=1, tokens=9)
    world.update(engine, 1)
    begin(world, engine, "old", steps=1, tokens=9)
    records = dict(engine.adapters.adapters)
    tensors = {"nowhere.lora_A.weight": torch.ones(2, 2)} if case == "bad weights" else None

    with pytest.raises(ValueError):
        if tensors:
            engine.update_lora("policy", tensors, **{"running": "restart", **options})
        else:
            world.update(engine, 2, **options)

    assert engine.adapters.adapters == records
    world.update(engine, 2, running="restart")
    outputs = run(engine)
    world.check(outputs["oldest"], [0] * 2 + [2] * 7)
    world.check(outputs["old"], [1] + [2] * 8)


def test_more_processes_than_one_are_refused(world, engine):
    engine.add_lora(world.policy())
    engine.adapters._tensor_parallel_size = 2

    with pytest.raises(ValueError, match="tensor_parallel_size"):
        world.update(engine, 1)
    assert len(engine.adapters.adapters) == 1


def test_logprobs_are_those_of_transformers_and_peft(tmp_path):
    """Of a batch of old, restarted and new requests beside the base model."""
    from tests.worlds.adapters import ADAPTERS
    from tests.worlds.engines import TinyWorld
    from tests.worlds.models import token_ids

    tiny = TinyWorld(
        tmp_path, adapters={"first": ADAPTERS["qv"], "second": ADAPTERS["qv"], "third": ADAPTERS["qv"]}
    )
    engine, rng = tiny.engine(max_loras=3, max_cpu_loras=6, num_kv_blocks=200), random.Random(2)
    engine.add_lora(tiny.request("first"))
    prompts = {str(i): token_ids(rng.randint(3, 18), i) for i in range(9)}
    outputs = {}
    for i, (request_id, prompt) in enumerate(prompts.items()):
        if i in (3, 6):
            running = "finish" if i == 3 else "restart"
            engine.update_lora("first", tiny.path("second" if i == 3 else "third"), running=running)
        name = None if i % 4 == 3 else "first"
        engine.add_request(request_id, prompt, greedy(8, logprobs=0), lora_request=name)
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    outputs |= run(engine)

    oracle = tiny.oracle()
    for request_id, prompt in prompts.items():
        output = outputs[request_id]
        tokens, names = tokens_of(output), ["first", "second", "third"]
        versions = token_versions(output.lora_request, 8) if output.lora_request else [None] * 8
        for i, version in enumerate(versions):
            name = None if version is None else names[version]
            logits = oracle.logits(name, [prompt + tokens[:i]])[0, -1]
            right = logits.double().log_softmax(-1)[tokens[i]].item()
            assert abs(output.outputs[0].logprobs[i][tokens[i]].logprob - right) < 1e-9, (
                request_id,
                i,
                version,
            )
    assert {output.lora_version for output in outputs.values()} == {None, 2}
