"""What `step` gives out piece by piece: deltas, text up to a stop, logprobs, seeded draws."""

import math
import random
import subprocess
import sys

import pytest
import torch

from minivllm import SamplingParams
from minivllm.core.request import Request, RequestStatus
from minivllm.engine.output_processor import OutputProcessor
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import character_tokenizer, token_ids

PROMPT = token_ids(9, 2)


@pytest.fixture
def tokenizer():
    return character_tokenizer()


def sampled(**params):
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 12, "seed": 3, **params})


def all_params():
    """One of everything that changes when or how a request ends, or what is shown of it."""
    return [
        greedy(12),
        greedy(12, ignore_eos=False),
        sampled(),
        sampled(stop=["ab", "e", "xyz"]),
        sampled(stop=[" ", "Q"], include_stop_str_in_output=True, seed=5),
        sampled(stop=["Q"], min_tokens=6, seed=5),
        sampled(stop_token_ids=list(range(20, 40)), seed=6),
        sampled(stop_token_ids=list(range(3, 97)), min_tokens=4),
        sampled(logprobs=3),
        sampled(logprobs=0, top_k=5, top_p=0.9, min_p=0.01),
        sampled(skip_special_tokens=False, temperature=8.0, seed=9, max_tokens=30),
        sampled(skip_special_tokens=True, temperature=8.0, seed=9, max_tokens=30, ignore_eos=True),
        sampled(detokenize=False),
        sampled(max_tokens=1),
    ]


class TestDeltas:
    @pytest.fixture
    def streams(self, world, tokenizer):
        """params by request id, and the outputs of each in order; few blocks, so that some are preempted"""
        engine = world.engine(tokenizer, num_kv_blocks=24, max_num_batched_tokens=20)
        params = {str(i): param for i, param in enumerate(all_params() * 2)}
        adapters = [None, *world.names]
        for request_id, param in params.items():
            lora_request = world.request(adapters[int(request_id) % 5])
            engine.add_request(request_id, PROMPT, param, lora_request=lora_request)
        streams = {request_id: [] for request_id in params}
        while engine.has_unfinished_requests():
            for output in engine.step():
                streams[output.request_id].append(output)
        assert engine.get_metrics()["scheduler"]["num_preemptions"] > 0
        return params, streams

    def test_add_up_and_the_last_one_is_what_its_parameters_and_the_tokenizer_say(self, streams, tokenizer):
        params, streams = streams

        for request_id, outputs in streams.items():
            assert_adds_up(outputs)
            assert_ends_as_asked(outputs[-1].outputs[0], params[request_id], tokenizer)

    def test_come_with_every_way_to_end(self, streams):
        """The assertions above are worth something only if all of it happened."""
        _, streams = streams
        last = [outputs[-1].outputs[0] for outputs in streams.values()]

        assert {completion.finish_reason for completion in last} == {"stop", "length"}
        assert {type(completion.stop_reason) for completion in last} == {str, int, type(None)}


def assert_adds_up(outputs):
    """A token with each output, and one end."""
    text, ids = "", []
    for output in outputs:
        completion = output.outputs[0]
        text += completion.delta_text
        ids += completion.delta_token_ids
        assert (completion.text, completion.token_ids) == (text, ids)
        assert len(completion.delta_token_ids) == 1
        assert (completion.finish_reason is None) == (not output.finished)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def assert_ends_as_asked(completion, param, tokenizer):
    ids, stop = completion.token_ids, completion.stop_reason
    if completion.finish_reason == "stop" and not isinstance(stop, str):
        ids = ids[:-1]  # a token that ends a request has no text
    whole = tokenizer.decode(ids, skip_special_tokens=param.skip_special_tokens)
    if not param.detokenize:
        assert completion.text == ""
    elif isinstance(stop, str):
        assert whole.startswith(completion.text) and whole.endswith(stop)
        assert completion.text.endswith(stop) == param.include_stop_str_in_output
    else:
        assert completion.text == whole
    if param.stop and not param.include_stop_str_in_output and not param.min_tokens:
        assert not any(stop in completion.text for stop in param.stop)
    assert param.min_tokens <= len(completion.token_ids) <= param.max_tokens
    assert completion.finish_reason != "length" or len(completion.token_ids) == param.max_tokens


class TestStopStrings:
    @pytest.mark.parametrize(("adapter", "start"), [(None, 0), (None, 4), ("all", 3), ("all", 5)])
    def test_that_straddle_tokens_cut_the_text_before_them(self, world, tokenizer, start, adapter):
        """Nearly every token of this tokenizer is one character, so that three characters are three tokens."""
        ids = world.oracle().greedy(adapter, PROMPT, 12)
        texts = [tokenizer.decode(ids[:n]) for n in range(13)]
        stop = texts[-1][start : start + 3]
        params = greedy(12, stop=stop, skip_special_tokens=False)
        engine = world.engine(tokenizer)

        engine.add_request("a", PROMPT, params, lora_request=world.request(adapter))
        completion = run(engine)["a"].outputs[0]

        assert completion.text == texts[-1][: texts[-1].index(stop)]
        assert len(completion.token_ids) == next(n for n, text in enumerate(texts) if stop in text)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

    def test_found_with_the_last_token_allowed_are_the_reason(self, world, tokenizer):
        whole = tokenizer.decode(world.oracle().greedy("all", PROMPT, 5))
        engine = world.engine(tokenizer)

        engine.add_request("a", PROMPT, greedy(5, stop=whole[-1:]), lora_request=world.request("all"))
        completion = run(engine)["a"].outputs[0]

        assert completion.stop_reason == whole[-1]
        assert completion.text == whole[: whole.index(whole[-1])]

    def test_that_only_an_unfinished_character_makes_do_not_turn_an_error_into_a_stop(self):
        """The bytes left over when a request ends are shown as what a reader puts for them."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"Ã": 0, "a": 1}, [])))
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
        processor = OutputProcessor(tokenizer)
        request = Request("a", [1], greedy(9, stop="\N{REPLACEMENT CHARACTER}"))
        state = processor.new_state(request, None)
        processor.states[state.request.request_id] = state
        request.append_output_token(0)
        assert not processor.process(request).finished

        request.status, request.error = RequestStatus.FINISHED_ERROR, "the adapter is gone"
        output = processor.process(request)

        assert (output.outputs[0].finish_reason, output.error) == ("error", "the adapter is gone")


class TestLogprobs:
    @pytest.mark.parametrize("adapter", [None, "all", "patterns"])
    def test_are_those_of_transformers_and_peft(self, world, adapter):
        engine = world.engine(max_num_batched_tokens=6)
        engine.add_request("other", PROMPT, sampled(seed=1), lora_request=world.request("all"))
        engine.add_request("a", PROMPT, sampled(logprobs=4), lora_request=world.request(adapter))

        completion = run(engine)["a"].outputs[0]

        text = PROMPT + completion.token_ids
        logits = world.oracle().logits(adapter, [text])[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        for token, found, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            top = row.topk(4).indices.tolist()
            assert list(found) == [token, *(other for other in top if other != token)]
            for other, logprob in found.items():
                assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-6)
                assert logprob.rank == int((row > row[other]).sum()) + 1
        total = sum(row[token].item() for token, row in zip(completion.token_ids, expected))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-5)

    def test_name_their_tokens(self, world, tokenizer):
        engine = world.engine(tokenizer)
        engine.add_request("a", PROMPT, greedy(3, logprobs=2))

        completion = run(engine)["a"].outputs[0]

        for logprobs in completion.logprobs:
            assert {token: entry.decoded_token for token, entry in logprobs.items()} == {
                token: tokenizer.decode([token]) for token in logprobs
            }

    def test_are_not_made_unless_asked_for(self, world):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(3))

        completion = run(engine)["a"].outputs[0]

        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


class TestSeeds:
    def alone(self, world, adapter, params):
        engine = world.engine(max_loras=4)
        engine.add_request("a", PROMPT, params, lora_request=world.request(adapter))
        return tokens_of(run(engine)["a"])

    def test_make_a_request_its_own_whatever_it_is_batched_with(self, world):
        rng = random.Random(0)
        engine = world.engine(num_kv_blocks=20, max_num_batched_tokens=12, max_num_seqs=4)
        adapters = [None, *world.names] * 2
        rng.shuffle(adapters)
        for i, adapter in enumerate(adapters):
            params = sampled(seed=i if i % 3 else None)
            engine.add_request(str(i), PROMPT, params, lora_request=world.request(adapter))

        outputs = run(engine)

        for i, adapter in enumerate(adapters):
            if i % 3:
                assert tokens_of(outputs[str(i)]) == self.alone(world, adapter, sampled(seed=i)), i

    def test_draw_from_the_adapters_own_distribution(self, world):
        """One token of many seeds: as often as transformers + PEFT says, within five standard deviations."""
        engine = world.engine(max_num_seqs=100)
        count = 400
        for seed in range(count):
            params = SamplingParams(temperature=1.0, max_tokens=1, seed=seed)
            engine.add_request(str(seed), PROMPT, params, lora_request=world.request("qv"))

        tokens = torch.tensor([tokens_of(output)[0] for output in run(engine).values()])

        probabilities = world.oracle().logits("qv", [PROMPT])[0, -1].softmax(-1)
        for token, p in enumerate(probabilities.tolist()):
            deviation = math.sqrt(count * p * (1 - p))
            assert abs((tokens == token).sum() - count * p) <= 5 * deviation + 1


def test_a_progress_bar_brings_no_thread():
    """Beside a second thread, steps on a CPU are slower."""
    code = """
import threading
from minivllm.progress import ProgressBar

with ProgressBar(total=3, delay=0) as bar:
    bar.update(2)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
