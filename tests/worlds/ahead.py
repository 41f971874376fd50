"""An engine one step ahead of its tokens on a CPU, and what requests may want beside the likeliest token."""

from types import SimpleNamespace

from minivllm import LLMEngine
from minivllm.ahead.lookahead import LookaheadCore
from minivllm.gpu.step_graphs import StepGraphs

# Name -> what `SamplingParams` are given.
WISHES = {
    "logprobs": {"temperature": 0, "logprobs": 2},
    "drawn logprobs": {"temperature": 0.9, "seed": 3, "logprobs": 0},
    "repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "presence": {"temperature": 0.7, "seed": 8, "presence_penalty": 1.0, "frequency_penalty": 0.3},
    "bias": {"temperature": 0, "logit_bias": {5: 3.0}},
    "drawn": {"temperature": 1.1, "seed": 4},
    "filtered": {"temperature": 1.4, "seed": 9, "top_p": 0.7, "top_k": 20, "min_p": 0.01},
    "late stop": {"temperature": 0, "min_tokens": 4, "ignore_eos": False},
    "greedy": {"temperature": 0},
}


def run_ahead(engine):
    """The engine with a core that is one step ahead: a step is computed when it is launched, and its tokens are told
    when they are waited for.

    `engine.ahead.left` counts the steps that were left unread when the next one was scheduled.
    """
    engine.runner.graphs = StepGraphs(engine.runner, decodes=False, mixed=False, wrapper=lambda step: step)
    ahead = with_lookahead(engine)
    tokens = ahead.core.tokens
    ahead.ahead = SimpleNamespace(left=0, fail_next=False)
    leave = tokens.leave

    def leave_tokens(step):
        wait = leave(step)
        ahead.ahead.left += wait is not None

        def wait_or_fail():
            if ahead.ahead.fail_next:
                ahead.ahead.fail_next = False
                raise RuntimeError("the device is lost")
            return wait()

        return wait and wait_or_fail

    tokens.leave = leave_tokens
    return ahead


def with_lookahead(engine):
    """An engine of the same parts, whose core looks ahead."""

    class Ahead(LLMEngine):
        @staticmethod
        def make_core(config, tokenizer, warm_up, clock):
            return LookaheadCore(config, engine.executor, engine.scheduler, engine.adapters, tokenizer, clock)

    return Ahead(engine.config, engine.tokenizer, clock=engine.clock)
