"""Biases and penalties: against transformers' processors, plain float64 arithmetic, and the oracle's own tokens."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from minivllm import SamplingParams
from minivllm.core.request import Request
from minivllm.layers.penalties import TokenHistory, apply_penalties
from minivllm.layers.sampler import Sampler
from minivllm.worker.row_sampler import PendingStep
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import token_ids

VOCAB = 41
PROMPT = token_ids(11, 3)
ASKED = {
    "presence": {"presence_penalty": 1.3},
    "presence below 0": {"presence_penalty": -0.7},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.6},
    "repetition below 1": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": {5: -3.25, 11: 2.5}},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.4,
        "logit_bias": {3: 1.75, 9: -20.0},
    },
}


def bumpy(seed, rows=1, vocab=VOCAB, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)).to(dtype)


def by_hand(logits, prompt, output, asked):
    """The definition, one token at a time. (V,) floats -> (V,) floats"""
    said = Counter(output)
    seen = {*prompt, *output}
    result = []
    for token, logit in enumerate(logits):
        logit += asked.get("logit_bias", {}).get(token, 0.0)
        if token in seen:
            penalty = asked.get("repetition_penalty", 1.0)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= asked.get("frequency_penalty", 0.0) * said[token]
        logit -= asked.get("presence_penalty", 0.0) * (said[token] > 0)
        result.append(logit)
    return result


def applied(logits, prompt, output, **asked):
    return apply_penalties(logits, [SamplingParams(**asked)], [TokenHistory(prompt, output)])


class TestLogits:
    def test_of_a_repetition_penalty_are_transformers_own(self):
        from transformers import RepetitionPenaltyLogitsProcessor

        logits, ids = bumpy(2), [3, 9, 3, 7, 28, 40]
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())

        torch.testing.assert_close(applied(logits, ids[:4], ids[4:], repetition_penalty=1.7), expected)

    def test_of_a_bias_are_transformers_own(self):
        from transformers import SequenceBiasLogitsProcessor

        logits, biases = bumpy(3), {4: 2.25, 30: -7.5}
        processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
        expected = processor(torch.tensor([[1, 2]]), logits.clone())

        torch.testing.assert_close(applied(logits, [1, 2], [], logit_bias=biases), expected)

    def test_of_each_row_are_its_own(self):
        logits, asked = bumpy(4, rows=len(ASKED) + 1), [*ASKED.values(), {}]
        histories = [TokenHistory(token_ids(3 + i, i), token_ids(2 * i, 50 + i)) for i in range(len(asked))]
        histories = [TokenHistory([t % VOCAB for t in p], [t % VOCAB for t in o]) for p, o in histories]

        result = apply_penalties(logits, [SamplingParams(**a) for a in asked], histories)

        for row, (history, wanted) in enumerate(zip(histories, asked, strict=True)):
            assert result[row].tolist() == pytest.approx(
                by_hand(logits[row].tolist(), *history, wanted), rel=1e-14
            )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_of_a_row_that_asks_for_nothing_stay_what_they_are(self, dtype):
        logits = bumpy(5, rows=2, dtype=dtype)
        before = logits.clone()

        result = apply_penalties(
            logits, [SamplingParams(), SamplingParams(**ASKED["all"])], [TokenHistory([1], [3])] * 2
        )

        assert result.dtype == torch.float32
        assert torch.equal(result[0], before[0].float())
        assert torch.equal(logits, before)

    @pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
    def test_of_a_token_that_may_not_be_taken_stay_so(self, asked):
        logits = bumpy(6)
        logits[0, [3, 5, 11]] = -math.inf

        result = applied(logits, [5, 11], [3, 3], **asked)

        assert (result[0] == -math.inf).nonzero().flatten().tolist() == [3, 5, 11]

    @pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e300])
    def test_of_a_penalty_that_float32_does_not_hold_are_no_nan(self, penalty):
        logits = torch.tensor([[0.0, 2.5, -2.5, 1.0]])

        result = applied(logits, [0, 1, 2], [], repetition_penalty=penalty)

        assert not result.isnan().any()
        assert result[0, 3] == 1.0

    def test_that_are_not_there_are_passed_over(self):
        """An adapter may read tokens of its own that it cannot say."""
        logits = bumpy(7)

        result = applied(logits, [VOCAB + 2], [3], presence_penalty=1.5, logit_bias={VOCAB: 9.0, 4: 1.0})

        expected = logits.clone()
        expected[0, 3] -= 1.5
        expected[0, 4] += 1.0
        torch.testing.assert_close(result, expected)


class TestTokens:
    def choose(self, logits, row, output, prompt=()):
        sampled = Sampler(eos_token_ids=[0])(
            logits, [row], [None], [len(output)], [TokenHistory(prompt, output)]
        )
        return int(sampled.token_ids), sampled.logprobs[0]

    def test_that_are_held_off_are_not_brought_back_by_a_bias(self):
        logits = bumpy(8)
        row = SamplingParams(temperature=0, logit_bias={0: 50.0, 7: 40.0}, min_tokens=2)

        assert self.choose(logits, row, output=[5])[0] == 7
        assert self.choose(logits, row, output=[5, 5])[0] == 0

    def test_have_the_models_own_logprobs(self):
        logits = bumpy(9)
        unlikely = int(logits[0].argmin())

        token, logprobs = self.choose(
            logits, SamplingParams(temperature=0, logit_bias={unlikely: 60.0}, logprobs=1), output=[]
        )

        expected = logits[0].log_softmax(dim=-1)
        assert token == unlikely
        assert logprobs[token].logprob == pytest.approx(float(expected[token]), abs=1e-12)
        assert logprobs[token].rank == VOCAB

    def test_are_drawn_from_what_the_penalties_leave(self):
        logits, output = bumpy(10, vocab=6), [2, 2, 4]
        asked = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
        row, sampler, draws = SamplingParams(**asked), Sampler(seed=3), 4000

        rows = sampler(
            logits.expand(draws, -1),
            [row] * draws,
            [None] * draws,
            [3] * draws,
            [TokenHistory([1], output)] * draws,
        )

        weights = np.exp(by_hand(logits[0].tolist(), [1], output, asked))
        expected = weights / weights.sum()
        found = np.bincount(rows.token_ids.numpy(), minlength=6) / draws
        assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / draws)


def answer_by_hand(world, adapter, prompt, length, asked):
    ids = list(prompt)
    for _ in range(length):
        logits = world.oracle().logits(adapter, [ids])[0, -1].tolist()
        ids.append(int(np.argmax(by_hand(logits, prompt, ids[len(prompt) :], asked))))
    return ids[len(prompt) :]


class TestAnEngine:
    def test_takes_the_likeliest_of_what_is_left_and_who_asks_for_nothing_the_likeliest(self, world):
        engine, changed = world.engine(), 0
        asked = {**ASKED, "nothing": {}}
        adapters = dict(zip(asked, itertools.cycle([None, "all"])))
        for name, wanted in asked.items():
            request = world.request(adapters[name])
            engine.add_request(name, PROMPT, greedy(10, **wanted), lora_request=request)

        outputs = run(engine)

        for name, wanted in asked.items():
            expected = answer_by_hand(world, adapters[name], PROMPT, 10, wanted)
            assert tokens_of(outputs[name]) == expected, name
            changed += expected != world.oracle().greedy(adapters[name], PROMPT, 10)
        assert changed >= 5, "agreement is worth something only if penalties change answers"

    def test_goes_on_after_a_preemption_as_if_there_had_been_none(self, world):
        engine = world.engine(num_kv_blocks=11, enable_prefix_caching=False)
        for i in range(4):
            engine.add_request(str(i), PROMPT, greedy(12, **ASKED["all"]))

        outputs = run(engine)

        expected = answer_by_hand(world, None, PROMPT, 12, ASKED["all"])
        assert [tokens_of(outputs[str(i)]) for i in range(4)] == [expected] * 4
        assert engine.scheduler.num_preemptions > 0

    @pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
    def test_does_not_take_what_a_captured_step_found_likeliest(self, world, asked):
        runner = world.engine().runner
        logits = bumpy(11, rows=2, vocab=97)
        requests = [Request("asks", [7, 8], greedy(9, **asked)), Request("does not", [7, 8], greedy(9))]
        for request in requests:
            request.output_token_ids += [int(logits[0].argmax())] * 9 + [3]

        found = runner.sample_tokens(PendingStep(requests, logits, logits.argmax(dim=-1)))

        left = by_hand(logits[0].tolist(), [7, 8], requests[0].output_token_ids, asked)
        assert {name: token for name, (token, _) in found.items()} == {
            "asks": int(np.argmax(left)),
            "does not": int(logits[1].argmax()),
        }

    def test_refuses_a_bias_of_a_token_that_there_is_not(self, world):
        engine = world.engine()

        with pytest.raises(
            ValueError, match=r"logit_bias \[97\] are unknown to this model; use ids from 0 to 96"
        ):
            engine.add_request("a", PROMPT, greedy(2, logit_bias={96: 1.0, 97: 1.0}))

        assert not engine.has_unfinished_requests()


class TestMaxTokensOfNone:
    def test_go_on_until_the_context_is_full(self, world):
        engine = world.engine(max_model_len=40)
        engine.add_request("a", PROMPT, greedy(None))

        output = run(engine)["a"]

        assert tokens_of(output) == world.oracle().greedy(None, PROMPT, 40 - len(PROMPT))
        assert output.outputs[0].finish_reason == "length"

    def test_end_where_a_stop_token_comes(self, world):
        answer = world.oracle().greedy(None, PROMPT, 8)
        engine = world.engine(max_model_len=40)
        engine.add_request("a", PROMPT, greedy(None, stop_token_ids=[answer[-1]]))

        assert tokens_of(run(engine)["a"]) == answer[: answer.index(answer[-1]) + 1]
