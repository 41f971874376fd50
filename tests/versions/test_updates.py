"""An adapter's weights are replaced while requests run: who has which, who waits, and what is refused by name."""

import re

import pytest
import torch
from learning_world import Asked, learning_world, ours

from minivllm import SamplingParams
from minivllm.lora.request import AtLeast
from minivllm.versions.weights import token_versions
from tests.worlds.ahead import run_ahead
from tests.worlds.engines import greedy, run, tokens_of

PROMPT = list(range(3, 20))  # four full blocks of 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return learning_world(tmp_path_factory)


def ask(world, engine, name, request_id="r", tokens=6, prompt=PROMPT, adapter=None, **params):
    adapter = world.request(name) if adapter is None else adapter
    engine.add_request(request_id, prompt, greedy(tokens, logprobs=0, **params), lora_request=adapter)
    return Asked(name, prompt)


def answered(world, engine, folder_of, **asked):
    outputs = run(engine)
    for request_id, one in asked.items():
        one.output = outputs[request_id]
    world.check(list(asked.values()), folder_of)
    return outputs


class TestWhoHasWhichVersion:
    def test_the_next_request_has_the_new_weights_and_says_so(self, world):
        engine = world.engine()
        one = ask(world, engine, "policy")
        first = answered(world, engine, {0: "policy"}, r=one)["r"]

        assert world.update(engine, "again") == 1
        one = ask(world, engine, "policy")
        second = answered(world, engine, {1: "again"}, r=one)["r"]

        assert (first.lora_version, second.lora_version) == (0, 1)
        assert (first.lora_request.lora_name, second.lora_request.lora_name) == ("policy", "policy")

    def test_requests_of_the_base_model_have_none(self, world):
        engine = world.engine()
        engine.add_request("r", PROMPT, greedy(2))

        assert run(engine)["r"].lora_version is None

    def test_requests_under_way_finish_with_their_own_beside_new_ones(self, world):
        engine = world.engine()
        old = ask(world, engine, "policy", "old", tokens=8)
        engine.step()
        world.update(engine, "again")
        new = ask(world, engine, "policy", "new", tokens=8)
        engine.step()

        assert len(engine.adapters.manager.list_active_adapters()) == 2, "two versions in one step"
        assert engine.debug_info()["states"] == {"policy": "in a slot"}
        answered(world, engine, {0: "policy", 1: "again"}, old=old, new=new)
        assert (old.output.lora_version, new.output.lora_version) == (0, 1)
        assert len(engine.adapters.adapters) == 1, "the old one went with its last request"
        assert engine.adapters.manager.list_adapters().keys() == engine.adapters.adapters.keys()

    def test_with_one_slot_the_versions_take_turns(self, world):
        engine = world.engine(max_loras=1)
        old = ask(world, engine, "policy", "old", tokens=30)
        engine.step()
        world.update(engine, "again")
        new = ask(world, engine, "policy", "new", tokens=30)

        answered(world, engine, {0: "policy", 1: "again"}, old=old, new=new)

    def test_a_restarted_request_is_computed_anew_and_keeps_its_tokens(self, world):
        engine = world.engine()
        one = ask(world, engine, "policy", tokens=9)
        for _ in range(4):
            engine.step()
        world.update(engine, "again", running="restart")
        assert len(engine.adapters.adapters) == 1, "nobody uses the old one"

        answered(world, engine, {0: "policy", 1: "again"}, r=one)

        assert token_versions(one.output.lora_request, 9) == [0] * 4 + [1] * 5
        assert one.output.lora_version == 1

    def test_one_step_ahead_of_its_tokens_too(self, world):
        engine = run_ahead(world.engine())
        one = ask(world, engine, "policy", tokens=9)
        for _ in range(4):
            engine.step()
        world.update(engine, "again", running="restart")

        answered(world, engine, {0: "policy", 1: "again"}, r=one)

        assert engine.ahead.left > 3
        assert token_versions(one.output.lora_request, 9)[-4:] == [1] * 4

    def test_twice_restarted(self, world):
        engine = world.engine()
        one = ask(world, engine, "policy", tokens=9)
        for folder in ("again", "higher", "third"):
            for _ in range(2):
                engine.step()
            world.update(engine, folder, running="restart")

        folder_of = dict(enumerate(["policy", "again", "higher", "third"]))
        answered(world, engine, folder_of, r=one)

        assert len(set(token_versions(one.output.lora_request, 9))) == 4

    def test_a_prompt_that_is_not_computed_to_its_end_is_of_the_new_version_alone(self, world):
        engine = world.engine(max_num_batched_tokens=4, max_num_seqs=2)
        one = ask(world, engine, "policy", tokens=4, prompt_logprobs=0)
        engine.step()
        engine.step()
        world.update(engine, "again", running="restart")

        answered(world, engine, {1: "again"}, r=one)

        found = torch.tensor(
            [entry[token].logprob for entry, token in zip(one.output.prompt_logprobs[1:], PROMPT[1:])]
        )
        logits = world.oracle().logits("again", [PROMPT])[0].log_softmax(-1)
        expected = torch.tensor([logits[i, token].item() for i, token in enumerate(PROMPT[1:])])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_several_answers_of_one_request_are_all_restarted(self, world):
        engine = world.engine()
        params = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True, logprobs=0)
        engine.add_request("n", PROMPT, params, lora_request=world.request("policy"))
        engine.step()
        world.update(engine, "again", running="restart")

        output = run(engine)["n"]

        assert output.lora_version == 1 and len(engine.adapters.adapters) == 1
        for answer in output.outputs:
            logits = world.oracle().logits("again", [PROMPT + answer.token_ids])[0, len(PROMPT) - 1 : -1]
            last = logits.log_softmax(-1)[-1, answer.token_ids[-1]].item()
            assert abs(last - answer.logprobs[-1][answer.token_ids[-1]].logprob) < 1e-9

    def test_a_reload_in_place_counts_too(self, world):
        engine = world.engine()
        answered(world, engine, {0: "policy"}, r=ask(world, engine, "policy"))

        engine.add_lora(world.request("policy", load_inplace=True, lora_path=str(world.path("again"))))
        engine.add_request("r", PROMPT, greedy(4, logprobs=0), lora_request="policy")

        assert run(engine)["r"].lora_version == 1
        assert world.update(engine, "third") == 2
        engine.add_lora(world.request("policy", load_inplace=True, lora_path=str(world.path("higher"))))
        one = ask(world, engine, "policy", adapter="policy")
        answered(world, engine, {3: "higher"}, r=one)


class TestThePrefixCache:
    def test_no_block_of_another_version_is_found(self, world):
        engine = world.engine()
        answered(world, engine, {0: "policy"}, r=ask(world, engine, "policy"))
        world.update(engine, "again")

        first = answered(world, engine, {1: "again"}, r=ask(world, engine, "policy"))["r"]
        second = answered(world, engine, {1: "again"}, r=ask(world, engine, "policy"))["r"]

        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)

    def test_a_restarted_request_finds_no_block_of_its_own_past(self, world):
        engine = world.engine()
        one = ask(world, engine, "policy", tokens=12)
        for _ in range(6):
            engine.step()
        hits = engine.scheduler.kv_cache.prefix_cache_stats.hits
        world.update(engine, "again", running="restart")
        engine.step()

        assert engine.scheduler.kv_cache.prefix_cache_stats.hits == hits
        answered(world, engine, {0: "policy", 1: "again"}, r=one)


class TestRequestsThatWait:
    def test_for_a_version_that_is_there_nobody_waits(self, world):
        engine = world.engine()
        engine.add_lora(world.request("policy"))
        world.update(engine, "again", version=7)
        one = ask(world, engine, "policy", adapter=AtLeast("policy", 7))

        answered(world, engine, {7: "again"}, r=one)

    @pytest.mark.parametrize("running", ["finish", "restart"])
    def test_others_pass_until_the_version_comes(self, world, running):
        engine = world.engine()
        engine.add_lora(world.request("policy"))
        waits = ask(world, engine, "policy", "waits", adapter=AtLeast("policy", 2))
        passes = ask(world, engine, "policy", "passes", tokens=20)
        base = ask(world, engine, None, "base", tokens=14)
        for _ in range(3):
            engine.step()
        assert engine.trace.records[-1].skipped[0].reason == "version pending"
        world.update(engine, "again", running=running)
        for _ in range(3):
            engine.step()
        assert not engine.scheduler.requests["waits"].output_token_ids, "version 1 will not do"
        world.update(engine, "third", running=running)

        folder_of = {0: "policy", 1: "again", 2: "third"}
        answered(world, engine, folder_of, waits=waits, passes=passes, base=base)

        assert waits.output.lora_version == 2
        assert passes.output.lora_version == (0 if running == "finish" else 2)

    def test_a_reload_in_place_wakes_them_once_it_is_done(self, world):
        engine = world.engine()
        runs = ask(world, engine, "policy", "runs", tokens=6)
        engine.step()
        waits = ask(world, engine, "policy", "waits", adapter=AtLeast("policy", 1))
        engine.add_lora(world.request("policy", load_inplace=True, lora_path=str(world.path("again"))))

        answered(world, engine, {0: "policy", 1: "again"}, runs=runs, waits=waits)

        assert (runs.output.lora_version, waits.output.lora_version) == (0, 1)

    def test_the_time_limit_ends_a_wait_by_name(self, world):
        now = 100.0
        engine = world.engine()
        engine.adapters.clock = lambda: now
        engine.add_lora(world.request("policy"))
        ask(world, engine, "policy", adapter=AtLeast("policy", 1, seconds=5))
        engine.step()
        now += 4.9
        engine.step()
        assert engine.has_unfinished_requests()
        now += 0.2

        output = run(engine)["r"]

        assert output.error == (
            "version 1 of adapter 'policy' did not come within 5 s, it is at 0; update it, or wait longer"
        )
        assert output.lora_version is None and len(engine.adapters.adapters) == 1

    def test_an_abort_and_an_unload_end_it(self, world):
        engine = world.engine()
        engine.add_lora(world.request("policy"))
        ask(world, engine, "policy", "aborted", adapter=AtLeast("policy", 1))
        ask(world, engine, "policy", "left", adapter=AtLeast("policy", 1))
        engine.step()
        engine.abort_request("aborted")
        engine.remove_lora(world.request("policy").lora_int_id)

        outputs = run(engine)

        assert outputs.keys() == {"left"} and "is being unloaded" in outputs["left"].error
        assert not engine.adapters.adapters and not engine.scheduler.in_flight

    def test_for_an_adapter_that_nobody_has_added_nobody_waits(self, world):
        engine = world.engine()

        with pytest.raises(ValueError, match="policy"):
            ask(world, engine, "policy", adapter=AtLeast("policy", 1))


class TestTheAdapterAsAWhole:
    def test_the_id_that_it_was_added_by_means_the_newest_version(self, world):
        engine = world.engine()
        given = world.request("policy").lora_int_id
        engine.add_lora(world.request("policy"))
        world.update(engine, "again")
        world.update(engine, "third")

        assert engine.has_lora(given) and engine.pin_lora(given)
        one = ask(world, engine, "policy")
        answered(world, engine, {2: "third"}, r=one)
        assert engine.unpin_lora(given)
        assert engine.update_lora(given, world.path("again")) == 3
        assert engine.remove_lora(given)
        assert not engine.adapters.adapters and not engine.adapters.aliases and not engine.has_lora(given)
        engine.add_lora(world.request("policy"))
        assert engine.adapters.by_name == {"policy": given}

    def test_another_folder_under_that_id_is_refused(self, world):
        engine = world.engine()
        engine.add_lora(world.request("policy"))
        world.update(engine, "again")

        with pytest.raises(ValueError, match=r"belongs to adapter 'policy', which is at version 1"):
            ask(world, engine, "policy", adapter=world.request("policy", lora_path=str(world.path("all"))))

    def test_an_unload_waits_for_all_versions(self, world):
        engine = world.engine()
        old = ask(world, engine, "policy", "old", tokens=8)
        engine.step()
        world.update(engine, "again")
        engine.remove_lora(world.request("policy").lora_int_id)

        assert engine.adapters.named("policy") and engine.adapters.adapters[engine.adapters.by_name["policy"]]
        with pytest.raises(ValueError, match="is being unloaded"):
            ask(world, engine, "policy", "new")
        with pytest.raises(ValueError, match="is being unloaded"):
            world.update(engine, "third")
        answered(world, engine, {0: "policy"}, old=old)
        assert not engine.adapters.adapters

    def test_a_pin_passes_to_the_new_version_once_the_old_one_has_gone(self, world):
        engine = world.engine(max_loras=1)
        engine.add_lora(world.request("policy"))
        engine.pin_lora(world.request("policy").lora_int_id)
        old = ask(world, engine, "policy", "old", tokens=8)
        engine.step()
        world.update(engine, "again")
        assert not engine.adapters.pinned
        new = ask(world, engine, "policy", "new", tokens=8)

        answered(world, engine, {0: "policy", 1: "again"}, old=old, new=new)

        engine.add_request("base", PROMPT, greedy(1))
        run(engine)
        newest = engine.adapters.by_name["policy"]
        assert engine.adapters.pinned == engine.adapters.manager.pinned_adapters == {newest}

    def test_weights_come_back_after_an_eviction_though_the_trainer_has_gone_on(self, world):
        engine = world.engine(max_loras=1, max_cpu_loras=2)
        engine.add_lora(world.request("policy"))
        tensors, config = world.tensors("again"), world.config("again")
        engine.update_lora("policy", tensors, peft_config=config)
        for tensor in tensors.values():
            tensor.zero_()
        config["lora_alpha"] *= 4
        for name in ("all", "patterns"):
            ask(world, engine, name)
            run(engine)
        assert engine.adapters.by_name["policy"] not in engine.adapters.manager.list_adapters()

        answered(world, engine, {1: "again"}, r=ask(world, engine, "policy"))

    def test_a_mix_is_of_the_newest_version(self, world):
        from minivllm.mixes import mix

        engine = world.engine(max_cpu_loras=8)
        engine.add_lora(world.request("policy"))
        for folder in ("policy", "again"):
            for part in ("policy", world.request("policy")):
                engine.add_request("r", PROMPT, greedy(6, logprobs=0), lora_request=mix([(part, 1.0)]))
                output = run(engine)["r"]
                one = Asked("policy", PROMPT, tokens_of(output), output, [folder] * 6)
                assert (ours(output) - world.logprobs(one)).abs().max() < 1e-9
            world.update(engine, "again")


def first(tensors):
    return min(tensors)


SPOILED = {
    "a shape": (lambda t: {**t, first(t): torch.zeros(4, 5)}, "must have shape|expected"),
    "NaN": (lambda t: {**t, first(t): t[first(t)] * torch.nan}, "NaN"),
    "no tensor": (lambda t: {**t, first(t): [1.0]}, "must be tensors"),
    "none": (lambda t: {}, "no tensors|no LoRA|empty|policy"),
    "a list": (lambda t: [1], "must be tensors by PEFT's names"),
}


class TestWhatIsRefused:
    @pytest.mark.parametrize("case", SPOILED)
    def test_weights_that_do_not_fit_change_nothing(self, world, case):
        spoil, said = SPOILED[case]
        engine = world.engine()
        old = ask(world, engine, "policy", "old")
        engine.step()
        before = dict(engine.adapters.adapters)

        with pytest.raises(ValueError, match=said) as refused:
            engine.update_lora("policy", spoil(world.tensors("again")), running="restart")

        assert len(str(refused.value)) <= 500
        assert engine.adapters.adapters == before
        new = ask(world, engine, "policy", "new")
        answered(world, engine, {0: "policy"}, old=old, new=new)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"adapter": "nobody"}, "adapter 'nobody' is unknown (known: policy)"),
            ({"adapter": 99}, "adapter 99 is unknown"),
            ({"version": 0}, "version must be"),
            ({"version": 3}, "greater than that of adapter 'policy', which is 3"),
            ({"version": 4.5}, "version must be"),
            ({"running": "drop"}, "unknown running 'drop'; use one of finish, restart"),
            ({"weights": "nowhere"}, "nowhere"),
        ],
    )
    def test_by_name(self, world, changes, said):
        engine = world.engine()
        engine.add_lora(world.request("policy"))
        world.update(engine, "again", version=3)
        arguments = {"adapter": "policy", "weights": str(world.path("again")), **changes}

        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(said)):
            engine.update_lora(**arguments)

    def test_weights_whose_prompts_would_be_read_otherwise(self, world):
        engine = world.engine()
        old = ask(world, engine, "policy")
        activated = {**world.config("again"), "alora_invocation_tokens": PROMPT[:2], "task_type": "CAUSAL_LM"}

        with pytest.raises(ValueError, match="'policy' may change weights, but not"):
            engine.update_lora("policy", world.tensors("again"), peft_config=activated)
        answered(world, engine, {0: "policy"}, r=old)

    def test_a_rank_above_the_highest_and_a_lower_one_is_served(self, world):
        engine = world.engine(max_lora_rank=8)
        engine.add_lora(world.request("policy"))

        with pytest.raises(ValueError, match="max_lora_rank"):
            world.update(engine, "higher")
        world.update(engine, "elsewhere")
        answered(world, engine, {1: "elsewhere"}, r=ask(world, engine, "policy"))

    def test_memory_that_is_full_of_adapters_in_use(self, world):
        engine = world.engine(max_loras=1, max_cpu_loras=1)
        old = ask(world, engine, "policy")
        engine.step()

        with pytest.raises(RuntimeError, match="'policy' cannot be updated: the 1 adapters in memory"):
            world.update(engine, "again")
        answered(world, engine, {0: "policy"}, r=old)
        world.update(engine, "again")

    @pytest.mark.parametrize(
        ("version", "seconds"), [(-1, 1), (1.5, 1), (True, 1), (1, -1), (1, float("nan"))]
    )
    def test_waits_that_nobody_may_ask_for(self, version, seconds):
        with pytest.raises((ValueError, TypeError)):
            AtLeast("policy", version, seconds)


def test_logprobs_in_float32_are_near_those_of_peft_in_float32(world):
    engine = world.engine(dtype="float32", num_kv_blocks=400, max_num_seqs=32)
    asked = [
        ask(world, engine, "policy", str(number), 16, prompt=PROMPT[: 3 + number % 14])
        for number in range(24)
    ]
    outputs = run(engine)
    off = []
    for number, one in enumerate(asked):
        one.output, one.folders = outputs[str(number)], ["policy"] * 16
        off.append((ours(one.output) - world.logprobs(one, torch.float32)).abs())
    off = torch.cat(off)

    print(f"{len(off)} tokens: at most {off.max():.1e}, {off.mean():.1e} on average")
    assert off.max() < 2e-5
