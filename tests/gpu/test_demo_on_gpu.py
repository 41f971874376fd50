"""The demo model and its four adapters on a GPU: float32 as on a CPU, bfloat16 as good as PEFT's."""

import pytest
import torch

from minivllm import LLM, LoRARequest
from tests.oracles.peft import Oracle
from tests.tools.device import needs_cuda
from tests.worlds.demo import NAMES, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import greedy, run, tokens_of

pytestmark = needs_cuda

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def base():
    return demo_base()


@pytest.fixture(scope="module")
def pairs():
    """(adapter, prompt): each adapter's task for itself, and for base."""
    return task_prompts(3)


def serve(base, pairs, device, dtype, watch=None):
    """Answers in the order of the pairs, served in one mixed batch on two slots."""
    llm = LLM(
        base,
        device=device,
        dtype=dtype,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=4,
        max_lora_rank=32,
        max_model_len=512,
        num_kv_blocks=600,
    )
    engine = llm.llm_engine
    if watch is not None:
        watch(engine.runner)
    for number, (name, prompt) in enumerate(pairs):
        adapter = name and LoRARequest(name, NAMES.index(name) + 1, str(adapter_folder(name)))
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS, ignore_eos=False), lora_request=adapter)
    outputs = run(engine)
    return [outputs[str(number)] for number in range(len(pairs))]


def test_float32_gives_the_tokens_of_the_cpu(base, pairs):
    on_cpu = serve(base, pairs, "cpu", "float32")

    on_gpu = serve(base, pairs, "cuda", "float32")

    assert [tokens_of(output) for output in on_gpu] == [tokens_of(output) for output in on_cpu]


def test_bfloat16_is_as_close_to_float32_as_transformers_and_peft(base, pairs):
    logits = {}
    outputs = serve(base, pairs, "cuda", "bfloat16", watch=lambda runner: keep(logits, runner))
    oracles = {dtype: Oracle(base, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for oracle in oracles.values():
        for name in NAMES:
            oracle.load(name, adapter_folder(name))

    ours, theirs = [], []
    for number, (name, _) in enumerate(pairs):
        prompt, answer = outputs[number].prompt_token_ids, tokens_of(outputs[number])
        rows = {
            dtype: oracle.logits(name, [prompt + answer])[0, len(prompt) - 1 : -1].float()
            for dtype, oracle in oracles.items()
        }
        exact = rows[torch.float32]
        ours.append((torch.stack(logits[str(number)][: len(answer)]) - exact).abs())
        theirs.append((rows[torch.bfloat16] - exact).abs())

    ours, theirs = torch.cat(ours), torch.cat(theirs)
    print(
        f"mean error {ours.mean():.4f} ours, {theirs.mean():.4f} PEFT; largest {ours.max():.3f}, {theirs.max():.3f}"
    )
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


def keep(logits, runner):
    """Note every row of logits that a token is picked from, by request; one step ahead, a row more than its tokens."""
    launch = runner.launch_model

    def watched(output):
        step = launch(output)
        for request, row in zip(step.requests, step.logits if step.requests else ()):
            logits.setdefault(request.request_id, []).append(row.float().cpu())
        return step

    runner.launch_model = watched
