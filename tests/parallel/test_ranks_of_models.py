"""Engines of processes over gloo: four on a tiny model, three on the demo model, which has 9 query and 3 KV heads."""

import pytest

from minivllm import LLM, LoRARequest
from tests.worlds.demo import NAMES, adapter_folder, demo_base, task_prompts
from tests.worlds.engines import greedy, tiny_world, tokens_of

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.nightly
@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
def test_four_have_the_tokens_of_peft(tmp_path_factory, fully):
    world = tiny_world(tmp_path_factory)
    names = [None, *world.names] * 2
    llm = world.llm(
        tensor_parallel_size=4,
        threads=1,
        max_loras=4,
        fully_sharded_loras=fully,
        skip_tokenizer_init=True,
    )

    outputs = llm.generate(
        [{"prompt_token_ids": PROMPT}] * len(names),
        greedy(6),
        use_tqdm=False,
        lora_request=[world.request(name) for name in names],
    )

    llm.llm_engine.executor.shutdown()
    expected = [world.oracle().greedy(name, PROMPT, 6) for name in names]
    assert [tokens_of(output) for output in outputs] == expected


@pytest.mark.nightly
def test_three_have_the_tokens_of_one_on_the_demo_model():
    base, pairs = str(demo_base()), task_prompts(2)
    loras = [
        name and LoRARequest(name, NAMES.index(name) + 1, str(adapter_folder(name))) for name, _ in pairs
    ]
    options = {
        "device": "cpu",
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
        "num_kv_blocks": 300,
    }

    def tokens(**more):
        llm = LLM(base, **options, **more)
        outputs = llm.generate([p for _, p in pairs], greedy(12), use_tqdm=False, lora_request=loras)
        if "tensor_parallel_size" in more:
            llm.llm_engine.executor.shutdown()
        return [tokens_of(output) for output in outputs]

    alone = tokens()
    assert tokens(tensor_parallel_size=3, threads=1) == alone
    assert tokens(tensor_parallel_size=3, threads=1, fully_sharded_loras=True) == alone
