"""Adapters in pages on several ranks: the pages that a slot has on rank 0 are those that it has on all."""

import pytest

from minivllm.gpu.pages.ledger import GivenPages, PageLedger
from tests.worlds.engines import greedy, tiny_world, tokens_of

PROMPT = [5, 6, 7, 8, 9]


def test_a_slot_gets_the_pages_that_were_told():
    ledger = PageLedger(8)
    for adapter_id, pages in ((7, [2, 5]), (9, [0])):
        ledger.lender = GivenPages(pages)

        ledger.reserve(adapter_id, len(pages))
        ledger.assign(adapter_id, adapter_id, len(pages))

        assert ledger.held[adapter_id] == pages
    assert not ledger.reserved


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "fully"), [(2, False), (2, True), (4, True)])
def test_tokens_are_those_of_one_rank_while_adapters_come_and_go(tmp_path_factory, size, fully):
    world = tiny_world(tmp_path_factory)
    options = {"punica_backend": "paged", "dtype": "float32", "max_loras": 3, "threads": 1}
    loras = [world.request(name) for name in [None, *world.names, *reversed(world.names)]]

    def answers(**more):
        llm = world.llm(**options, **more, skip_tokenizer_init=True)
        prompts = [{"prompt_token_ids": PROMPT}] * len(loras)
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False, lora_request=loras)
        return llm, list(map(tokens_of, outputs))

    _, alone = answers()
    llm, found = answers(tensor_parallel_size=size, fully_sharded_loras=fully)

    assert found == alone
    llm.llm_engine.executor.shutdown()
