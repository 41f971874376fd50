"""vLLM's example of offline multi-LoRA inference: its calls, names and arguments serve the demo model here.

The calls are those of examples/offline_inference/multilora_inference.py (v0.22.1). Imports, model and adapter differ,
and answers are shorter: 8 tokens, not 128.
"""

import gc

import pytest
import torch

from minivllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from minivllm.lora.request import LoRARequest
from tests.oracles.peft import Oracle
from tests.worlds.demo import adapter_folder, demo_base

QUESTION = (
    "[user] Write a SQL query to answer the question based on the table schema.\n\n context: CREATE TABLE "
    "table_name_74 (icao VARCHAR, airport VARCHAR)\n\n question: Name the ICAO for lilongwe international airport "
    "[/user] [assistant]"
)
ADAPTER = "bullets"  # its rank is 8, all that the example's engine takes


def create_test_prompts(lora_path: str) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    greedy = {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 8}
    return [
        ("A robot may not injure a human being", SamplingParams(**greedy), None),
        (
            "To be or not to be,",
            SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=8),
            None,
        ),
        (
            QUESTION,
            SamplingParams(**greedy, stop_token_ids=[32003]),
            LoRARequest("sql-lora", 1, lora_path),
        ),
        (
            QUESTION,
            SamplingParams(**greedy, stop_token_ids=[32003]),
            LoRARequest("sql-lora2", 2, lora_path),
        ),
        # Of earlier versions of the example.
        (
            "To be or not to be,",
            SamplingParams(n=3, temperature=0.8, top_p=0.95, max_tokens=6),
            LoRARequest("sql-lora", 1, lora_path),
        ),
    ]


def process_requests(
    engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]
) -> dict[str, RequestOutput]:
    request_id, finished = 0, {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                finished[request_output.request_id] = request_output
    return finished


def initialize_engine(model: str) -> LLMEngine:
    engine_args = EngineArgs(
        model=model, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256
    )
    return LLMEngine.from_engine_args(engine_args)


@pytest.fixture(scope="module")
def outputs():
    yield process_requests(
        initialize_engine(str(demo_base())), create_test_prompts(str(adapter_folder(ADAPTER)))
    )
    gc.collect()


@pytest.fixture(scope="module")
def oracle():
    oracle = Oracle(demo_base(), torch.float32)
    oracle.load(ADAPTER, adapter_folder(ADAPTER))
    yield oracle
    gc.collect()


def test_every_request_is_answered_and_alike_under_both_names_of_one_adapter(outputs):
    assert sorted(outputs) == ["0", "1", "2", "3", "4"]
    assert [len(outputs[i].outputs) for i in sorted(outputs)] == [1, 1, 1, 1, 3]
    assert all(output.error is None for output in outputs.values())
    assert all(c.text and c.finish_reason in ("length", "stop") for o in outputs.values() for c in o.outputs)
    assert outputs["2"].outputs[0].text == outputs["3"].outputs[0].text
    assert outputs["3"].lora_request.lora_name == "sql-lora2"


@pytest.mark.nightly
@pytest.mark.parametrize(("request_id", "adapter"), [("0", None), ("2", ADAPTER), ("3", ADAPTER)])
def test_answers_and_logprobs_are_those_of_transformers_and_peft(outputs, oracle, request_id, adapter):
    output = outputs[request_id]
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids

    expected = oracle.logits(adapter, [prompt + answer])[0, :-1].log_softmax(dim=-1)  # (T - 1, V)

    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert output.prompt_logprobs[0] is None
    for row, token, logprobs in zip(expected, [*prompt, *answer][1:], found, strict=True):
        assert logprobs[token].logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert float(row.max()) == pytest.approx(max(p.logprob for p in logprobs.values()), abs=2e-3)
    for row, token in zip(expected[len(prompt) - 1 :], answer, strict=True):
        assert float(row[token]) >= float(row.max()) - 2e-3
