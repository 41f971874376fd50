"""Whatever is batched with whatever, in whichever order and pieces: what comes out is what transformers + PEFT
give for each request alone.
"""

import random

import pytest
import torch

from tests.worlds.engines import crossed, greedy, run, tiny_world, tokens_of, watch_logits
from tests.worlds.models import token_ids

VARIANTS = ["llama-llama3-rope", "mistral-one-kv-head", "qwen2-tied", "qwen3-wide-heads"]
NUM_TOKENS = 10

# What may not change a single token, each leaving some part of the engine little room, and what must happen for that.
SETTINGS = {
    "plenty of everything": ({"max_loras": 4}, ["mixed_steps"]),
    "one slot": ({"max_loras": 1, "max_cpu_loras": 1}, ["evictions", "skips"]),
    "two slots, loops": ({"punica_backend": "loops"}, ["evictions"]),
    "few large blocks, no prefix cache": (
        {"block_size": 16, "num_kv_blocks": 6, "max_loras": 3, "enable_prefix_caching": False},
        ["mixed_steps"],
    ),
    "blocks of 1, loops": (
        {"block_size": 1, "num_kv_blocks": 60, "punica_backend": "loops"},
        ["prefix_hits"],
    ),
    "short turns": (
        {"max_lora_wait_steps": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16},
        ["evictions"],
    ),
    # The last two have rows attend to what earlier steps have written: every model is tried in them.
    "chunks of 5 tokens": ({"max_num_batched_tokens": 5, "max_num_seqs": 4}, ["chunks"]),
    "few blocks": ({"num_kv_blocks": 14, "max_loras": 3, "max_num_batched_tokens": 24}, ["preemptions"]),
}


@pytest.fixture(params=VARIANTS)
def world(request, tmp_path_factory):
    return tiny_world(tmp_path_factory, request.param)


@pytest.fixture
def llama(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def workload(world, seed):
    """24 (adapter, prompt) pairs: every adapter and base, prompts of one prefix, one prompt under all adapters."""
    rng = random.Random(seed)
    adapters = [None, *world.names]
    shared = token_ids(14, seed)
    same_for_all = token_ids(18, seed + 1)
    pairs = [(adapter, same_for_all) for adapter in adapters for _ in range(2)]
    for i in range(14):
        prefix = shared if i % 2 else []
        pairs.append((adapters[i % 5], prefix + token_ids(rng.randint(1, 20), 100 * seed + i)))
    rng.shuffle(pairs)
    return pairs


_answers = {}


def answer(world, adapter, prompt):
    """The oracle's, asked once a test run."""
    key = world.variant, adapter, tuple(prompt)
    if key not in _answers:
        _answers[key] = world.oracle().greedy(adapter, prompt, NUM_TOKENS)
    return _answers[key]


def serve(world, engine, pairs, seed=None):
    """All at once, or with a seed at random moments; the outputs by number."""
    rng = random.Random(seed)
    outputs = {}
    for number, (adapter, prompt) in enumerate(pairs):
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS), lora_request=world.request(adapter))
        while seed is not None and rng.random() < 0.5:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs | run(engine)


def check_hits_stay_within_an_adapter(engine, pairs):
    """A hit needs an earlier request of the same adapter that begins with the same tokens."""
    seen = set()
    for record in engine.trace.records:
        for row in record.rows:
            adapter, prompt = pairs[int(row.request)]
            assert row.adapter == adapter
            if row.cached:
                sources = [pairs[number] for number in seen]
                assert any(a == adapter and p[: row.cached] == prompt[: row.cached] for a, p in sources)
        seen |= {int(row.request) for row in record.rows}


class TestTokens:
    @pytest.mark.parametrize(("variant", "setting"), crossed(VARIANTS, SETTINGS))
    def test_are_those_of_each_request_alone(self, tmp_path_factory, variant, setting):
        world = tiny_world(tmp_path_factory, variant)
        pairs = workload(world, seed=0)
        options, happens = SETTINGS[setting]
        engine = world.engine(**options)

        outputs = serve(world, engine, pairs)

        for number, (adapter, prompt) in enumerate(pairs):
            assert tokens_of(outputs[str(number)]) == answer(world, adapter, prompt), f"{number}: {adapter}"
        check_hits_stay_within_an_adapter(engine, pairs)
        happened = engine.trace.summary()
        assert all(happened[name] for name in happens), happened

    @pytest.mark.parametrize("seed", range(3))
    def test_do_not_depend_on_the_order_or_the_time_of_arrival(self, llama, seed):
        rng = random.Random(seed)
        pairs = workload(llama, seed=0)
        rng.shuffle(pairs)
        engine = llama.engine(
            max_loras=rng.choice([1, 2, 3]),
            max_num_seqs=rng.choice([2, 5, 30]),
            block_size=rng.choice([2, 4, 8]),
            num_kv_blocks=rng.choice([22, 60]),
            max_num_batched_tokens=rng.choice([7, 20, 200]),
        )

        outputs = serve(llama, engine, pairs, seed)

        for number, (adapter, prompt) in enumerate(pairs):
            assert tokens_of(outputs[str(number)]) == answer(llama, adapter, prompt), f"{number}: {adapter}"


class TestLogits:
    @pytest.mark.parametrize(("variant", "backend"), crossed(VARIANTS, ["grouped", "loops"]))
    def test_agree_with_peft_to_a_ten_thousandth_of_the_largest_in_float32(
        self, tmp_path_factory, variant, backend
    ):
        world = tiny_world(tmp_path_factory, variant)
        engine = world.engine(dtype="float32", max_num_batched_tokens=24, punica_backend=backend)
        oracle = world.oracle(torch.float32)
        pairs = workload(world, seed=0)
        params = [greedy(NUM_TOKENS) for _ in pairs]
        with watch_logits(engine, params) as seen:
            for number, (adapter, prompt) in enumerate(pairs):
                engine.add_request(str(number), prompt, params[number], lora_request=world.request(adapter))
            outputs = run(engine)

        for number, (adapter, prompt) in enumerate(pairs):
            text = prompt + tokens_of(outputs[str(number)])
            expected = oracle.logits(adapter, [text])[0, len(prompt) - 1 : -1]
            ours = torch.stack(seen[number])
            assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max(), f"{number}: {adapter}"

    def test_are_moved_by_every_adapter_by_a_tenth_at_least(self, world):
        """Agreement proves nothing of adapters that change nothing."""
        oracle = world.oracle()
        prompt = token_ids(20, 5)
        base = oracle.logits(None, [prompt])

        for name in world.names:
            moved = (oracle.logits(name, [prompt]) - base).abs().max()
            assert moved >= 0.1 * base.abs().max(), name


class TestPrefixCache:
    PROMPT = token_ids(21, 9)

    def ask(self, engine, world, adapter):
        engine.add_request("a", self.PROMPT, greedy(NUM_TOKENS), lora_request=world.request(adapter))
        output = run(engine)["a"]
        assert tokens_of(output) == answer(world, adapter, self.PROMPT)
        return output.num_cached_tokens

    def test_the_same_prompt_finds_the_full_blocks_of_its_own_adapter_and_no_others(self, llama):
        engine = llama.engine(max_loras=4)
        first, second = ([self.ask(engine, llama, adapter) for adapter in [None, *llama.names]] for _ in "12")

        assert first == [0] * 5
        assert second == [20] * 5  # five blocks of 4; the last token is always computed

    def test_an_adapter_that_was_only_out_of_its_slot_finds_them_too(self, llama):
        engine = llama.engine(max_loras=1, max_cpu_loras=2)
        self.ask(engine, llama, "qv")
        self.ask(engine, llama, "all")
        assert engine.adapters.manager.lora_index_to_id == [2]

        assert self.ask(engine, llama, "qv") == 20
