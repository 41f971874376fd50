"""Who computed a block: keys that are spelled out, by brute force, and what requests of an engine find."""

import itertools
import random
import sys

import pytest

from minivllm.core.block_hashes import BASE_IDENTITY, block_hashes
from minivllm.core.kv_cache import hash_block_tokens
from minivllm.core.request import Request
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.small import SmallWorld, write_adapter

pytestmark = pytest.mark.lab("12.2")

LOAD, OTHER = 7, 8
WHOSE = {BASE_IDENTITY: "base", LOAD: "mine", OTHER: "other", None: "nobody"}


def spelled_out(parent, tokens, identity):
    """A key that says of each token whose it is: `20base 21base 22mine`."""
    return " ".join([*(parent or "").split(), *(f"{token}{WHOSE[identity]}" for token in tokens)])


def request(tokens, start=0, identity=LOAD):
    made = Request("r", list(tokens), greedy(1), adapter_start=start)
    made.cache_identity = identity
    return made


def owned(tokens, start, identity, count):
    """The first tokens, each with who computed it, as `spelled_out` has it."""
    return " ".join(
        f"{token}{WHOSE[BASE_IDENTITY if i < start else identity]}" for i, token in enumerate(tokens[:count])
    )


def keys(asked, num_blocks, block_size=4, hash_tokens=spelled_out):
    return block_hashes(asked, num_blocks, block_size, hash_tokens)


TOKENS = list(range(20, 40))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 7, 8, 11, 12, 15, 16, 17, sys.maxsize])
@pytest.mark.parametrize("identity", [LOAD, BASE_IDENTITY], ids=["an adapter's", "base's"])
def test_each_token_of_a_block_is_the_base_models_before_the_adapter_and_else_the_adapters(start, identity):
    asked = request(TOKENS, start, identity)

    for blocks in (0, 4):
        expected = [owned(TOKENS, start, identity, 4 * (i + 1)) for i in range(blocks)]
        assert keys(asked, blocks) == expected, f"it begins at token {start}"


def test_real_keys_are_equal_where_tokens_and_owners_are_and_else_never():
    """Of few tokens and owners, so that many are equal; with each block size."""
    rng, seen, pairs = random.Random(3), {}, {}
    for _ in range(1500):
        size = rng.choice((1, 2, 3, 4))
        tokens = [rng.randint(0, 1) for _ in range(2 * size)]
        identity = rng.choice((BASE_IDENTITY, LOAD, OTHER))
        start = rng.randint(0, 2 * size + 1) if identity else 0
        asked = request(tokens, start, identity)
        for i, key in enumerate(keys(asked, 2, size, hash_block_tokens)):
            whose = size, owned(tokens, start, identity, size * (i + 1))
            assert pairs.setdefault(whose, key) == key, f"two keys of {whose[1]}"
            assert seen.setdefault((size, key), whose) == whose, (
                f"one key of {whose[1]} and of {seen[size, key][1]}"
            )
    assert len(seen) > 300


def test_the_same_tokens_may_have_their_border_elsewhere():
    """An adapter with the tokens 5 5: of the block 5 5 9 5 it owns the last one only where another 5 follows."""
    ends, goes_on = request([5, 5, 9, 5, 1], 0), request([5, 5, 9, 5, 5], 3)

    assert keys(ends, 1, 4, hash_block_tokens) != keys(goes_on, 1, 4, hash_block_tokens)


@pytest.mark.parametrize(
    ("start", "known"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (16, 4), (sys.maxsize, 4)]
)
def test_of_an_adapter_that_is_not_loaded_the_blocks_before_it_alone_are_known(start, known):
    found = keys(request(TOKENS, start, None), 4)

    assert found == [owned(TOKENS, start, None, 4 * (i + 1)) for i in range(known)], (
        f"it begins at token {start}"
    )


@pytest.mark.parametrize("start", [0, 6])
def test_keys_are_kept_and_only_new_ones_are_hashed(start):
    hashed = []

    def noted(parent, tokens, identity):
        hashed.extend(tokens)
        return spelled_out(parent, tokens, identity)

    asked = request(TOKENS, start)
    first = keys(asked, 2, hash_tokens=noted)
    assert hashed == TOKENS[:8]
    hashed.clear()

    assert keys(asked, 2, hash_tokens=noted) == first and hashed == []
    assert keys(asked, 3, hash_tokens=noted)[:2] == first
    assert hashed == TOKENS[8:12], "tokens of blocks that were hashed before"
    assert keys(asked, 1, hash_tokens=noted) == first[:1], "of the first block alone"
    assert asked.block_hashes == [owned(TOKENS, start, LOAD, 4 * (i + 1)) for i in range(3)]


def test_what_is_kept_is_nobody_elses_to_change():
    asked = request(TOKENS, 6)

    keys(asked, 3).clear()
    keys(asked, 1).append("mine")

    assert keys(asked, 3) == keys(request(TOKENS, 6), 3)


# ---- through the engine ---------------------------------------------------------------------------------------------

INVOKED = [9, 4]
TALK = [
    *range(5, 9),
    *range(10, 15),
    *INVOKED,
    *range(15, 20),
]  # the adapter begins in the third block of four


@pytest.fixture
def world(tmp_path):
    made = SmallWorld(tmp_path)
    for number in (1, 2):
        folder = tmp_path / f"adapter{number}"
        write_adapter(folder, number, alora_invocation_tokens=INVOKED, task_type="CAUSAL_LM")
    return made


def ask(world, engine, adapter, tokens=TALK):
    """Its answer, and how many tokens were found."""
    name = str(engine.get_metrics()["steps"])
    engine.add_request(name, tokens, greedy(4), lora_request=world.request(adapter))
    output = run(engine)[name]
    return tokens_of(output), output.num_cached_tokens


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))), ids=str)
def test_each_answers_as_alone_whoever_asked_before(world, order):
    """Three ask the same: the base model and two adapters, which begin at token 9. Block 2 has both in it."""
    alone = {adapter: ask(world, world.engine(), adapter)[0] for adapter in order}
    engine = world.engine()

    found = {adapter: ask(world, engine, adapter) for adapter in order}

    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    assert {adapter: tokens for adapter, (tokens, _) in found.items()} == alone
    assert [cached for _, cached in found.values()] == [0, 8, 8], (
        "the two blocks before the adapter, and no other"
    )
    assert [ask(world, engine, adapter) for adapter in order] == [(alone[adapter], 12) for adapter in order]
