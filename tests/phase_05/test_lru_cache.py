"""The cache (lab 5.1), against a list that is kept in the order of use by hand."""

import random

import pytest

from minivllm.lora.lru_cache import LRUCache
from tests.worlds.managers import refusal

pytestmark = pytest.mark.lab("5.1")


def cache_with(*keys, capacity):
    cache = LRUCache(capacity)
    for key in keys:
        cache.put(key, f"value {key}")
    return cache


def assert_order(cache, expected, why):
    assert list(cache) == expected, f"{why}\n  oldest first, expected {expected}, got {list(cache)}"


def test_use_not_insertion_decides_who_is_oldest():
    cache = cache_with(1, 2, 3, capacity=3)

    cache.touch(1)

    assert_order(cache, [2, 3, 1], "put 1, 2, 3, then touch 1")
    assert cache.remove_oldest() == (2, "value 2"), "remove_oldest returns key and value of the oldest, 2"


def test_a_use_is_a_change_although_nobody_comes_or_goes():
    """Who has looked at the order before asks `version` whether it still holds."""
    cache = cache_with(1, 2, capacity=2)
    version = cache.version

    cache.touch(1)

    assert cache.version is not version, (
        "the order was 1, 2 and is 2, 1 now, and `version` is the one of before"
    )


def test_a_full_cache_forgets_the_oldest_for_a_new_key():
    cache = cache_with(1, 2, capacity=2)

    cache.put(3, "value 3")

    assert_order(cache, [2, 3], "put 1, 2, 3 with room for two")


def test_replacing_needs_no_room_and_counts_as_use():
    cache = cache_with(1, 2, 3, capacity=3)

    cache.put(2, "other")

    assert_order(cache, [1, 3, 2], "put 1, 2, 3 with room for three, then put 2 again")
    assert cache[2] == "other"


@pytest.mark.parametrize("value", [0, None, ""])
def test_a_value_that_counts_as_false_is_there_all_the_same(value):
    """Slot 0 is one."""
    cache = LRUCache(2)
    for key in (1, 2):
        cache.put(key, value)

    cache.put(2, "other")

    assert_order(cache, [1, 2], f"1 and 2 are put with {value!r}, and 2 again: nobody has to go")


def test_a_cache_without_room_takes_nothing():
    cache = LRUCache(0)

    with refusal(RuntimeError, "a cache for 0 has room for nothing"):
        cache.put(1, "value 1")

    assert_order(cache, [], "nothing was put")


def test_who_must_stay_is_passed_over_for_the_next_oldest():
    cache = cache_with(1, 2, 3, 4, capacity=4)

    found = cache.remove_oldest(spare=[1, 2])

    assert found == (3, "value 3"), f"1 and 2 are spared, so 3 is the oldest that may go, not {found}"
    assert_order(cache, [1, 2, 4], "3 is forgotten, nobody else")


def test_who_must_stay_is_named_where_nobody_may_go():
    cache = cache_with(71, 82, capacity=2)

    with pytest.raises(RuntimeError) as refused:
        try:
            cache.remove_oldest(spare={82, 71})
        except StopIteration:
            pytest.fail("nobody may go: a RuntimeError was expected, and StopIteration was raised")

    said = str(refused.value)
    unnamed = [key for key in (71, 82) if str(key) not in said]
    assert not unnamed, f"71 and 82 must stay; the error does not name {unnamed}: {said!r}"


def test_a_put_without_room_changes_nothing():
    cache = cache_with(1, 2, capacity=2)
    version = cache.version

    with refusal(RuntimeError, "1 and 2 are spared, so there is no room for 3"):
        cache.put(3, "value 3", spare=[1, 2])

    assert cache.version is version, (
        "3 was in the cache for a moment: `version` says that something has changed"
    )
    assert_order(cache, [1, 2], "1 and 2 are spared: 3 cannot be put, and nothing changes")


def test_touching_what_is_not_there_is_an_error():
    cache = LRUCache(2)

    with refusal(KeyError, "1 is not in the cache, so it cannot be touched"):
        cache.touch(1)

    assert_order(cache, [], "touching an unknown key adds nothing")


def test_looking_is_not_using():
    cache = cache_with(1, 2, capacity=2)

    assert cache.get(1) == "value 1"
    assert cache.get(3) is None

    assert_order(cache, [1, 2], "looking leaves the order as it was")


class ListCache:
    """(key, value) in the order of use, the oldest first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = []

    def __str__(self):
        return ", ".join(str(row[0]) for row in self.rows) or "nothing"

    def row(self, key):
        return next((row for row in self.rows if row[0] == key), None)

    def get(self, key):
        row = self.row(key)
        return row and row[1]

    def touch(self, key):
        row = self.row(key)
        if row is None:
            raise KeyError
        self.rows = [other for other in self.rows if other is not row] + [row]
        return row[1]

    def put(self, key, value, spare):
        row = self.row(key)
        if row is None and len(self.rows) == self.capacity:
            self.remove_oldest(spare)
        self.rows = [other for other in self.rows if other is not row]
        self.rows.append([key, value])

    def remove_oldest(self, spare):
        for row in self.rows:
            if row[0] not in spare:
                self.rows.remove(row)
                return row[0], row[1]
        raise RuntimeError

    def pop(self, key, default):
        row = self.row(key)
        if row is not None:
            self.rows.remove(row)
        return row[1] if row else default


def outcome(operation, *args):
    try:
        return operation(*args)
    except (LookupError, ValueError, RuntimeError) as error:
        return type(error)


def random_operation(rng, step):
    key = rng.randrange(7)
    spare = rng.sample(range(7), rng.choice([0, 0, 1, 4]))
    name = rng.choice(["get", "touch", "put", "put", "put", "remove_oldest", "pop"])
    args = {"put": (key, f"value of step {step}", spare), "remove_oldest": (spare,), "pop": (key, None)}
    return name, args.get(name, (key,))


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_any_history_leaves_what_a_list_in_the_order_of_use_leaves(capacity):
    for seed in range(25):
        rng = random.Random(seed)
        cache, model = LRUCache(capacity), ListCache(capacity)
        for step in range(50):
            name, args = random_operation(rng, step)
            told = f"{name}{args} on a cache for {capacity} that holds, oldest first, {model}"

            ours, theirs = outcome(getattr(cache, name), *args), outcome(getattr(model, name), *args)

            if name == "touch":  # what the model's touch returns is for its own use
                ours, theirs = isinstance(ours, type) and ours, isinstance(theirs, type) and theirs
            assert ours == theirs, f"{told}: expected {theirs}, got {ours}"
            found, expected = list(cache.items()), [(row[0], row[1]) for row in model.rows]
            assert found == expected, f"{told}:\n  expected {expected}\n  found    {found}"
            assert list(cache) == [row[0] for row in model.rows], told
            assert len(cache) == len(model.rows), told
            assert [key in cache for key in range(7)] == [model.row(k) is not None for k in range(7)], told
