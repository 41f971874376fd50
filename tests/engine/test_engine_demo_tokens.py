"""Eight prompts over four trained adapters and base, two slots, on the demo model in float32: token for token what
transformers + PEFT give for each alone.
"""

import gc

import pytest

from minivllm import LLM, LoRARequest
from tests.worlds.demo import NAMES, DemoOracle, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import greedy, run, tokens_of

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def base():
    return demo_base()


@pytest.fixture(scope="module")
def pairs():
    """Eight (adapter, prompt)"""
    return task_prompts(1)


@pytest.fixture(scope="module")
def oracle(base):
    return DemoOracle(base, NUM_TOKENS)


def make_llm(base, **options):
    defaults = {
        "dtype": "float32",
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 4,
        "max_lora_rank": 32,
        "max_model_len": 512,
        "num_kv_blocks": 22,
        "max_num_batched_tokens": 100,
        "warm_up": False,
    }
    return LLM(base, **{**defaults, **options})


def lora(name):
    return name and LoRARequest(name, NAMES.index(name) + 1, str(adapter_folder(name)))


def serve(llm, pairs, order, **params):
    """The outputs, by number, of the pairs sent in this order."""
    engine = llm.llm_engine
    for number in order:
        adapter, prompt = pairs[number]
        engine.add_request(
            str(number), prompt, greedy(NUM_TOKENS, ignore_eos=False, **params), lora_request=lora(adapter)
        )
    return {int(number): output for number, output in run(engine).items()}


@pytest.fixture(scope="module")
def first_run(base, pairs):
    """Served once under pressure: outputs, and the engine's account of it."""
    llm = make_llm(base)
    outputs = serve(llm, pairs, range(len(pairs)))
    yield outputs, llm.llm_engine
    del llm
    gc.collect()


def test_every_token_is_the_one_that_transformers_and_peft_pick(first_run, pairs, oracle):
    outputs, _ = first_run

    for number, (adapter, prompt) in enumerate(pairs):
        tokens = tokens_of(outputs[number])
        likeliest, lead = oracle.likeliest(adapter, prompt, tokens)
        assert tokens == likeliest, f"{number} ({adapter}): differs by {max(lead):.2g} in a logit"


def test_answers_end_where_the_model_ends_them(first_run, oracle):
    outputs, _ = first_run
    end = oracle.tokenizer.eos_token_id

    for output in outputs.values():
        completion = output.outputs[0]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == end)
        assert end not in completion.token_ids[:-1]
        assert completion.text == oracle.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"stop", "length"}


def test_the_run_had_evictions_chunks_preemptions_and_hits_within_adapters(first_run, pairs):
    _, engine = first_run

    summary = engine.trace.summary()
    for what in ("evictions", "chunks", "preemptions", "prefix_hits", "skips", "mixed_steps"):
        assert summary[what] > 0, what
    for record in engine.trace.records:
        assert len({row.adapter for row in record.rows} - {None}) <= 2
        assert all(row.adapter == pairs[int(row.request)][0] for row in record.rows)
