"""n > 1: several answers to one prompt are those that n requests with these seeds get, in one output."""

import os
import shutil
import signal

import pytest

from minivllm import LoRARequest, SamplingParams
from tests.worlds.ahead import run_ahead
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import character_tokenizer, token_ids
from tests.worlds.spoiled_adapters import fill

LONG = token_ids(21, 3)  # five blocks and a token
SHORT = [5, 6, 7]


def drawn(n=1, seed=7, max_tokens=6, **params):
    return SamplingParams(n=n, seed=seed, temperature=1.5, max_tokens=max_tokens, ignore_eos=True, **params)


def alone(world, prompt, seeds, adapter=None, **params):
    """The tokens of one request for each seed, one engine for each."""
    answers = []
    for seed in seeds:
        engine = world.engine()
        engine.add_request("a", prompt, drawn(seed=seed, **params), lora_request=world.request(adapter))
        answers.append(tokens_of(run(engine)["a"]))
    return answers


def answers_of(output):
    return [completion.token_ids for completion in output.outputs]


def assert_nothing_is_left(engine):
    assert not engine.has_unfinished_requests()
    assert not engine.scheduler.requests and not engine.output_processor.states
    assert not engine.runner.row_sampler.draws
    assert engine.get_metrics()["scheduler"]["kv_cache_usage"] == 0


class TestAnswers:
    @pytest.mark.parametrize("adapter", [None, "all"])
    @pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
    def test_are_those_of_requests_with_seeds_that_follow_one_another(self, world, prompt, adapter):
        engine = world.engine()
        engine.add_request("a", prompt, drawn(n=3), lora_request=world.request(adapter))

        outputs = run(engine)

        assert answers_of(outputs["a"]) == alone(world, prompt, [7, 8, 9], adapter)
        assert [completion.index for completion in outputs["a"].outputs] == [0, 1, 2]
        assert outputs.keys() == {"a"} and outputs["a"].finished
        assert_nothing_is_left(engine)

    def test_differ_without_a_seed(self, world):
        engine = world.engine()
        engine.add_request("a", SHORT, drawn(n=4, seed=None, max_tokens=12))

        answers = answers_of(run(engine)["a"])

        assert len({tuple(answer) for answer in answers}) == 4

    def test_of_the_largest_seed_begin_again_at_0(self, world):
        engine = world.engine()
        engine.add_request("a", SHORT, drawn(n=2, seed=2**64 - 1))

        assert answers_of(run(engine)["a"]) == alone(world, SHORT, [2**64 - 1, 0])

    def test_end_each_at_its_own_time(self, world):
        plain = alone(world, LONG, [7, 8, 9], max_tokens=8)
        end = plain[1][2]
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=3, max_tokens=8, stop_token_ids=[end]))

        output = run(engine)["a"]

        expected = [answer[: answer.index(end) + 1] if end in answer else answer for answer in plain]
        assert answers_of(output) == expected
        assert output.outputs[1].finish_reason == "stop"
        assert len({len(answer) for answer in expected}) > 1

    def test_compute_their_prompt_once(self, world):
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=4, max_tokens=3))

        run(engine)

        # All of it once, then the last token of it for three, and two more tokens for each.
        assert engine.scheduler.num_computed_tokens == 21 + 3 * 1 + 4 * 2

    def test_of_a_short_prompt_or_without_a_cache_wait_for_nobody(self, world):
        for prompt, options in ((SHORT, {}), (LONG, {"enable_prefix_caching": False})):
            engine = world.engine(**options)
            engine.add_request("a", prompt, drawn(n=4, max_tokens=3))

            engine.step()

            assert len(engine.scheduler.running) == 4

    def test_have_prompt_logprobs_once(self, world):
        one, many = world.engine(), world.engine()
        one.add_request("a", LONG, drawn(prompt_logprobs=2))
        many.add_request("a", LONG, drawn(n=2, prompt_logprobs=2))

        found, expected = run(many)["a"], run(one)["a"]

        assert found.prompt_logprobs == expected.prompt_logprobs
        assert answers_of(found) == alone(world, LONG, [7, 8])


def policy(world, step, tenant, **changes):
    """As a trainer's next policy comes: the same id, another name and another folder."""
    return LoRARequest(f"policy-{step}", 9, str(world.path(tenant)), **changes)


class TestBesideAReload:
    """All answers to one prompt are of the weights that were there when it was asked, and keep nobody waiting."""

    @pytest.mark.parametrize(
        ("order", "steps"),
        [("request", 0), ("request", 2), ("add_lora", 0), ("add_lora", 1), ("add_lora", 4)],
    )
    def test_they_are_of_the_weights_before_it(self, world, steps, order):
        engine = world.engine(max_num_batched_tokens=8)  # the prompt takes three steps
        engine.add_request("old", LONG, drawn(n=3), lora_request=policy(world, 1, "qv"))
        outputs = [output for _ in range(steps) for output in engine.step()]
        if order == "add_lora":
            engine.add_lora(policy(world, 2, "all", load_inplace=True))
        is_ordered_here = order == "request"

        new = policy(world, 2, "all", load_inplace=is_ordered_here)
        engine.add_request("new", SHORT, greedy(4), lora_request=new)
        engine.add_request("base", SHORT, greedy(4))

        outputs = run(engine)
        assert answers_of(outputs["old"]) == alone(world, LONG, [7, 8, 9], "qv")
        assert tokens_of(outputs["new"]) == world.oracle().greedy("all", SHORT, 4)
        assert tokens_of(outputs["base"]) == world.oracle().greedy(None, SHORT, 4)
        assert_nothing_is_left(engine)

    def test_that_fails_they_are_answered_and_so_is_who_comes_after(self, world, tmp_path):
        bad = shutil.copytree(world.path("qv"), tmp_path / "bad")
        fill(bad, float("nan"))
        engine = world.engine(max_num_batched_tokens=8)
        engine.add_request("old", LONG, drawn(n=3), lora_request=policy(world, 1, "qv"))
        engine.step()
        engine.add_lora(LoRARequest("policy-2", 9, str(bad), load_inplace=True))
        engine.add_request("new", LONG, drawn(n=3), lora_request="policy-2")

        outputs = run(engine)
        engine.add_request("after", SHORT, greedy(4), lora_request="policy-1")

        assert answers_of(outputs["old"]) == alone(world, LONG, [7, 8, 9], "qv")
        assert [completion.finish_reason for completion in outputs["new"].outputs] == ["error"] * 3
        assert tokens_of(run(engine)["after"]) == world.oracle().greedy("qv", SHORT, 4)

    @pytest.mark.parametrize(("change", "max_tokens"), [("reload", 1), ("unload", 3)])
    def test_they_are_of_the_weights_before_it_though_the_first_has_its_tokens_unread(
        self, world, change, max_tokens
    ):
        """The scheduler is through with a request of one token when the step is launched."""
        expected = alone(world, LONG, [7, 8, 9], "qv", max_tokens=max_tokens)
        engine = run_ahead(world.engine())
        engine.add_request(
            "old", LONG, drawn(n=3, max_tokens=max_tokens), lora_request=policy(world, 1, "qv")
        )
        engine.step()
        if change == "reload":
            engine.add_lora(policy(world, 2, "all", load_inplace=True))
        else:
            engine.remove_lora(9)

        outputs = run(engine)

        assert answers_of(outputs["old"]) == expected
        assert engine.list_loras() == ({9} if change == "reload" else set())
        assert_nothing_is_left(engine)

    def test_ordered_while_one_was_preempted_they_keep_their_weights(self, world):
        """Blocks for two of the three at a time, and slots for one adapter."""
        engine = world.engine(max_loras=1, max_cpu_loras=1, num_kv_blocks=14, max_num_batched_tokens=8)
        engine.add_request("old", LONG, drawn(n=3, max_tokens=12), lora_request=policy(world, 1, "qv"))
        engine.add_request("other", SHORT, greedy(12), lora_request=world.request("mlp"))
        outputs = []
        for _ in range(40):
            outputs += engine.step() if not engine.scheduler.num_preemptions else []
        engine.add_request("new", SHORT, greedy(4), lora_request=policy(world, 2, "all", load_inplace=True))

        outputs = run(engine) | {output.request_id: output for output in outputs if output.finished}

        assert answers_of(outputs["old"]) == alone(world, LONG, [7, 8, 9], "qv", max_tokens=12)
        assert tokens_of(outputs["other"]) == world.oracle().greedy("mlp", SHORT, 12)
        assert tokens_of(outputs["new"]) == world.oracle().greedy("all", SHORT, 4)


class TestTheirPlaceInTheQueue:
    @pytest.mark.parametrize("prompt", [SHORT, LONG[:12]], ids=["short", "long"])
    def test_is_the_one_they_came_to(self, world, prompt):
        engine, adapter, ended = world.engine(max_num_seqs=2), "qv", []
        engine.add_request("first", prompt, drawn(n=2, max_tokens=4), lora_request=world.request(adapter))
        for i in range(20):
            engine.add_request(str(i), SHORT, greedy(4), lora_request=world.request(adapter))

        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]

        # One row is free while the first answer computes the prompt, and somebody else may have it.
        assert ended.index("first") <= 2
        assert len(ended) == 21

    def test_is_kept_by_those_that_wait_when_the_first_fails(self, world, monkeypatch):
        engine = world.engine(max_num_seqs=2)
        engine.add_request("beside", SHORT, greedy(9))
        engine.add_request("a", LONG, drawn(n=3))
        sample = engine.runner.row_sampler.sample

        def sampled(requests, logits):
            if any(request.request_id == "0_a" for request in requests):
                raise ValueError("cannot be drawn")
            return sample(requests, logits)

        monkeypatch.setattr(engine.runner.row_sampler, "sample", sampled)
        output = run(engine)["a"]

        expected = alone(world, LONG, [7, 8, 9])
        assert answers_of(output) == [[], *expected[1:]]
        assert [completion.finish_reason for completion in output.outputs] == ["error", "length", "length"]
        assert_nothing_is_left(engine)


class TestOutputs:
    @pytest.mark.parametrize("prompt", ["abc", "abcdefghijklmnopqrs"], ids=["short", "long"])
    def test_stream_what_is_new_of_every_answer(self, world, prompt):
        engine = world.engine(character_tokenizer())
        engine.add_request("a", prompt, drawn(n=3, logprobs=1))
        tokens, texts, outputs = [[], [], []], ["", "", ""], []

        while engine.has_unfinished_requests():
            [output] = engine.step()
            outputs.append(output)
            for i, completion in enumerate(output.outputs):
                tokens[i] += completion.delta_token_ids
                texts[i] += completion.delta_text
                assert completion.token_ids == tokens[i] and completion.text == texts[i]

        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(len(output.outputs) == 3 for output in outputs)
        assert [len(completion.logprobs) for completion in outputs[-1].outputs] == [6] * 3
        assert outputs[-1].prompt == prompt
        assert outputs[0].metrics.finished_time is None
        assert outputs[-1].metrics.finished_time >= outputs[-1].metrics.first_token_time


class TestTheirIds:
    @pytest.mark.parametrize("taken", ["a", "0_a", "2_a"])
    def test_must_be_free(self, world, taken):
        engine = world.engine()
        engine.add_request(taken, SHORT, greedy(3))

        with pytest.raises(ValueError, match=f"request id '{taken}' is in use"):
            engine.add_request("a", SHORT, drawn(n=3))

        assert run(engine).keys() == {taken}

    @pytest.mark.parametrize("wanted", ["a", "0_a", "2_a"])
    def test_are_nobody_elses_while_they_live(self, world, wanted):
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=3))

        with pytest.raises(ValueError, match=f"request id '{wanted}' is in use"):
            engine.add_request(wanted, SHORT, greedy(3))

        run(engine)
        engine.add_request(wanted, SHORT, greedy(3))
        assert tokens_of(run(engine)[wanted]) == world.oracle().greedy(None, SHORT, 3)

    def test_may_be_used_again_by_a_request_that_has_to_wait(self, world):
        engine = world.engine(max_num_seqs=1)
        engine.add_request("a", SHORT, drawn(n=2, max_tokens=1))
        run(engine)
        engine.add_request("first", SHORT, greedy(5))
        engine.add_request("a", SHORT, drawn(n=2))

        outputs = run(engine)

        assert outputs.keys() == {"first", "a"}
        assert answers_of(outputs["a"]) == alone(world, SHORT, [7, 8])

    def test_of_generate_pass_over_those_in_use(self, world):
        llm = world.llm(skip_tokenizer_init=True)
        llm.llm_engine.add_request("0", LONG, drawn(n=2))

        [output] = llm.generate({"prompt_token_ids": SHORT}, drawn(n=2), use_tqdm=False)

        assert answers_of(output) == alone(world, SHORT, [7, 8])


class TestAnAbort:
    @pytest.mark.parametrize(("prompt", "steps"), [(SHORT, 0), (SHORT, 1), (LONG, 1), (LONG, 3)])
    def test_reaches_every_child(self, world, prompt, steps):
        engine = world.engine()
        engine.add_request("a", prompt, drawn(n=3))
        engine.add_request("b", SHORT, greedy(6))
        heard = [engine.step() for _ in range(steps)]

        engine.abort_request("a")

        outputs = run(engine)
        assert len(heard) == steps
        assert outputs.keys() == {"b"} and tokens_of(outputs["b"]) == world.oracle().greedy(None, SHORT, 6)
        assert_nothing_is_left(engine)

    def test_of_a_single_child_is_nobodys_to_order(self, world):
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=3))

        engine.abort_request(["0_a", "1_a"])

        assert answers_of(run(engine)["a"]) == alone(world, LONG, [7, 8, 9])


class TestAnError:
    def test_of_the_adapter_ends_all_answers(self, world, monkeypatch):
        engine = world.engine()

        def broken(requests):
            return {request.lora_int_id: ValueError("its file is gone") for request in requests if request}

        monkeypatch.setattr(engine.adapters.worker, "prepare_adapters", broken)
        engine.add_request("a", LONG, drawn(n=3), lora_request=world.request("qv"))
        output = run(engine)["a"]

        assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
        assert "its file is gone" in output.error
        assert_nothing_is_left(engine)

    def test_of_one_answer_leaves_the_others(self, world, monkeypatch):
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=3))
        engine.step()
        sample = engine.runner.row_sampler.sample

        def sampled(requests, logits):
            if any(request.request_id == "1_a" for request in requests):
                raise ValueError("cannot be drawn")
            return sample(requests, logits)

        monkeypatch.setattr(engine.runner.row_sampler, "sample", sampled)
        output = run(engine)["a"]

        expected = alone(world, LONG, [7, 8, 9])
        assert answers_of(output) == [expected[0], [], expected[2]]
        assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
        assert "cannot be drawn" in output.error

    def test_at_the_door_leaves_nothing(self, world):
        engine = world.engine(num_kv_blocks=6)

        with pytest.raises(ValueError, match="may need 7 KV blocks"):
            engine.add_request("a", LONG, drawn(n=3))

        assert_nothing_is_left(engine)
        assert not engine.core.parallel.parents

    def test_an_unload_waits_for_answers_that_have_not_begun(self, world):
        engine = world.engine()
        engine.add_request("a", LONG, drawn(n=3, max_tokens=1), lora_request=world.request("qv"))
        engine.remove_lora(1)

        output = run(engine)["a"]

        assert answers_of(output) == alone(world, LONG, [7, 8, 9], "qv", max_tokens=1)
        assert 1 not in engine.list_loras()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_ctrl_c_in_generate_leaves_nothing(world, monkeypatch, at):
    llm = world.llm(skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in (SHORT, LONG)]
    launch, steps = llm.llm_engine.runner.launch_model, []

    def launched(scheduled):
        steps.append(scheduled)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(scheduled)

    monkeypatch.setattr(llm.llm_engine.runner, "launch_model", launched)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, drawn(n=3, max_tokens=60), use_tqdm=False)

    assert_nothing_is_left(llm.llm_engine)
    outputs = llm.generate(prompts, drawn(n=3), use_tqdm=False)
    assert [answers_of(output) for output in outputs] == [
        alone(world, prompt, [7, 8, 9]) for prompt in (SHORT, LONG)
    ]


def test_more_answers_than_one_of_the_likeliest_tokens_are_refused():
    with pytest.raises(
        ValueError, match=r"n must be 1 where the likeliest token is taken \(temperature 0\), got 2"
    ):
        SamplingParams(n=2, temperature=0)
