"""The cache (lab 5.1), against a list that is kept in the order of use by hand."""

import random

import pytest

from minivllm.lora.lru_cache import LRUCache

pytestmark = pytest.mark.lab("5.1")


class ListCache:
    """(key, value, pinned) in the order of use, the oldest first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = []

    def row(self, key):
        return next((row for row in self.rows if row[0] == key), None)

    def get(self, key):
        return None if self.row(key) is None else self.touch(key)

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
        self.rows.append([key, value, bool(row and row[2])])

    def remove_oldest(self, spare):
        for row in self.rows:
            if not row[2] and row[0] not in spare:
                self.rows.remove(row)
                return row[0], row[1]
        raise RuntimeError

    def pin(self, key):
        if self.row(key) is None:
            raise ValueError
        self.row(key)[2] = True

    def unpin(self, key):
        if self.row(key) is not None:
            self.row(key)[2] = False

    def pop(self, key):
        row = self.row(key)
        if row is not None:
            self.rows.remove(row)
        return row and row[1]


def outcome(operation, *args):
    try:
        return operation(*args)
    except (KeyError, ValueError, RuntimeError) as error:
        return type(error)


def random_operation(rng):
    key = rng.randrange(7)
    spare = rng.sample(range(7), rng.choice([0, 0, 1, 4]))
    name = rng.choice(["get", "touch", "put", "put", "put", "remove_oldest", "pin", "unpin", "pop"])
    args = {"put": (key, rng.random(), spare), "remove_oldest": (spare,)}.get(name, (key,))
    return name, args


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_any_history_leaves_what_a_list_in_the_order_of_use_leaves(capacity):
    for seed in range(60):
        rng = random.Random(seed)
        cache, model = LRUCache(capacity), ListCache(capacity)
        for step in range(60):
            name, args = random_operation(rng)

            ours, theirs = outcome(getattr(cache, name), *args), outcome(getattr(model, name), *args)

            if name != "touch":  # what the model's touch returns is for its own use
                assert ours == theirs, (seed, step, name, args)
            assert list(cache.cache.items()) == [(row[0], row[1]) for row in model.rows], (seed, step, name)
            assert cache.pinned_items == {row[0] for row in model.rows if row[2]}, (seed, step, name)
            assert list(cache) == [row[0] for row in model.rows]
            assert len(cache) == len(model.rows)
            assert [key in cache for key in range(7)] == [model.row(key) is not None for key in range(7)]


def test_use_not_insertion_decides_who_is_oldest():
    cache = LRUCache(3)
    for key in (1, 2, 3):
        cache.put(key, f"value {key}")

    cache.touch(1)

    assert cache.remove_oldest() == (2, "value 2")


def test_looking_is_not_using():
    cache = LRUCache(2)
    cache.put(1, "a")
    cache.put(2, "b")

    assert cache.peek(1) == "a"
    assert cache.peek(3) is None

    assert list(cache) == [1, 2]


def test_a_copy_of_the_cache_is_nobody_elses():
    cache = LRUCache(2)
    cache.put(1, "a")
    cache.pin(1)

    cache.cache.clear()
    cache.pinned_items.clear()

    assert cache.cache == {1: "a"}
    assert cache.pinned_items == {1}


def test_a_put_without_room_changes_nothing():
    cache = LRUCache(2)
    cache.put(1, "a")
    cache.put(2, "b")
    cache.pin(1)

    with pytest.raises(RuntimeError, match="pinned or in use"):
        cache.put(3, "c", spare=[2])

    assert list(cache.cache.items()) == [(1, "a"), (2, "b")]


def test_touching_what_is_not_there_is_an_error():
    with pytest.raises(KeyError):
        LRUCache(2).touch(1)
