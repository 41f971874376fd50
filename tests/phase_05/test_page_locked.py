"""Page-locked memory is asked for in large pieces, and parts of it come back when no tensor lies there any more."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from minivllm.lora.gpu import page_locked
from minivllm.lora.gpu.page_locked import PageLockedMemory


class Driver:
    """locked: addresses and bytes; settled: how often somebody waited for copies."""

    def __init__(self):
        self.locked, self.settled = {}, 0

    def lock(self, memory):
        address = memory.ctypes.data
        self.locked[address] = memory.nbytes
        return lambda: self.locked.pop(address)

    def settle(self):
        self.settled += 1


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(page_locked, "PIECE_BYTES", 4096)
    return Driver()


def memory_of(driver):
    return PageLockedMemory(driver.lock, driver.settle)


def test_parts_lie_in_locked_pieces_and_apart_from_each_other(driver):
    memory = memory_of(driver)

    parts = [memory.take(nbytes) for nbytes in (1000, 300, 2500, 9000, 1)]

    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert [set(part.tolist()) for part in parts] == [{1}, {2}, {3}, {4}, {5}]
    assert [len(part) for part in parts] == [1000, 300, 2500, 9000, 1]
    for part in parts:
        start = part.data_ptr()
        assert any(a <= start and start + len(part) <= a + n for a, n in driver.locked.items())
    assert len(driver.locked) == 3 and memory.nbytes == sum(driver.locked.values())


def test_a_part_is_handed_out_again_when_its_last_view_is_gone_and_copies_are_through(driver):
    memory = memory_of(driver)
    part = memory.take(4096)
    view = part[100:200].view(2, 50)
    address = part.data_ptr()
    del part

    other = memory.take(4096)
    assert other.data_ptr() != address and driver.settled == 0
    del view
    again = memory.take(4096)

    assert again.data_ptr() == address
    assert driver.settled == 1 and len(driver.locked) == 2


def test_neighbours_that_come_free_are_one_part(driver):
    memory = memory_of(driver)
    parts = [memory.take(1024) for _ in range(4)]
    del parts[3], parts[1], parts[1]

    large = memory.take(3072)

    assert len(driver.locked) == 1
    assert large.data_ptr() == parts[0].data_ptr() + 1024


def test_whoever_finds_a_free_part_does_not_wait_for_a_piece_that_is_being_locked(driver):
    memory = memory_of(driver)
    held = memory.take(300)
    begun, go = threading.Event(), threading.Event()
    lock = driver.lock

    def slow(piece):
        begun.set()
        assert go.wait(30)
        return lock(piece)

    memory._lock_pages = slow
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(memory.take, 9000) for _ in range(2)]
        assert begun.wait(30)
        small = memory.take(300)
        assert not any(one.done() for one in large)
        go.set()
        parts = [held, small, *(one.result() for one in large)]

    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]
    assert len(driver.locked) == 3


def test_memory_is_unlocked_before_it_is_given_up(driver):
    memory = memory_of(driver)
    part = memory.take(10)
    del memory

    assert len(driver.locked) == 1
    del part

    assert not driver.locked


@pytest.mark.parametrize("seed", range(5))
def test_no_history_lets_two_tensors_share_a_byte(driver, seed):
    rng, memory, held = random.Random(seed), memory_of(driver), {}
    for number in range(1, 200):
        if held and rng.random() < 0.45:
            del held[rng.choice(list(held))]
        part = memory.take(rng.randint(1, 3000))
        held[number] = part.fill_(number)
        for name, tensor in held.items():
            assert torch.equal(tensor, torch.full_like(tensor, name))
    most = max(1, sum(-(-len(part) // 256) * 256 for part in held.values()))
    assert memory.nbytes >= most
    assert np.sum(list(driver.locked.values())) == memory.nbytes
