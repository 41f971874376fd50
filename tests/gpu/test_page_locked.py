"""Page-locked memory is asked for in large pieces, and parts of it come back when no tensor lies there any more."""

import random
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch

from minivllm.gpu import page_locked
from minivllm.gpu.page_locked import PageLockedMemory
from tests.worlds.waiting import PATIENCE, wait_until


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
    """Pieces are small, and come when somebody needs them."""
    monkeypatch.setattr(page_locked, "PIECE_BYTES", 4096)
    monkeypatch.setattr(page_locked, "AHEAD", 0)
    return Driver()


class Slow:
    """A call that begins, and then waits until it is told to go on."""

    def __init__(self, call, refuses=False):
        self.call, self.refuses, self.calls = call, refuses, 0
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.calls += 1
        self.begun.set()
        assert self.go.wait(PATIENCE)
        if self.refuses:
            raise RuntimeError("no memory")
        return self.call(*args)


class TwoPieces:
    """Memory whose first piece is full, and the parts that fill it. The second was grown when it was needed."""

    def __init__(self, driver):
        self.driver, self.memory, self.parts = driver, memory_of(driver), []
        self.take(9)
        assert len(driver.locked) == 2

    def take(self, count):
        self.parts += [self.memory.take(512) for _ in range(count)]

    def begin_to_grow(self, refuses=False):
        """A thread locks the third piece from now on, by the call that this gives. There are 3 parts left."""
        slow = self.memory._lock_pages = Slow(self.driver.lock, refuses)
        self.take(3)
        assert not self.memory._growth.locked()
        self.take(1)
        assert slow.begun.wait(PATIENCE)
        return slow

    def wait_for_growth(self):
        with self.memory._growth:
            pass

    def assert_apart(self):
        assert len({part.data_ptr() for part in self.parts}) == len(self.parts)


@pytest.fixture
def crowded(driver, monkeypatch):
    """Pieces come ahead."""
    monkeypatch.setattr(page_locked, "AHEAD", 4)
    return TwoPieces(driver)


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
    slow = memory._lock_pages = Slow(driver.lock)
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(memory.take, 9000) for _ in range(2)]
        assert slow.begun.wait(PATIENCE)
        small = memory.take(300)
        assert not any(one.done() for one in large)
        slow.go.set()
        parts = [held, small, *(one.result() for one in large)]

    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]
    assert len(driver.locked) == 3


def test_nobody_else_waits_while_one_waits_for_copies(driver):
    memory = memory_of(driver)
    held = [memory.take(1024) for _ in range(3)]
    del held[0]
    slow = memory._settle = Slow(driver.settle)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(memory.take, 2048)
        assert slow.begun.wait(PATIENCE)
        held.append(pool.submit(memory.take, 1024).result(PATIENCE))
        assert not large.done()
        slow.go.set()
        held.append(large.result(PATIENCE))
    assert len({part.data_ptr() for part in held}) == len(held)


def test_memory_is_unlocked_before_it_is_given_up(driver):
    memory = memory_of(driver)
    part = memory.take(10)
    del memory

    assert len(driver.locked) == 1
    del part

    assert not driver.locked


# ---- ahead ---------------------------------------------------------------------------------------------------


def test_a_piece_is_there_before_somebody_needs_it(crowded):
    slow = crowded.begin_to_grow()

    crowded.take(3)  # nobody waits
    assert crowded.memory.nbytes == 2 * 4096 and slow.calls == 1
    slow.go.set()
    crowded.wait_for_growth()
    crowded.take(1)

    assert crowded.memory.nbytes == 3 * 4096 and slow.calls == 1
    crowded.assert_apart()


def test_whoever_finds_nothing_waits_for_the_piece_that_is_on_its_way_and_not_for_the_next_one(crowded):
    slow, next_one = crowded.begin_to_grow(), Slow(crowded.driver.lock)
    crowded.take(3)
    crowded.memory._lock_pages = next_one

    with ThreadPoolExecutor(7) as pool:
        waiting = [pool.submit(crowded.memory.take, 512) for _ in range(7)]  # of a piece with 8 parts
        wait_until(lambda: crowded.memory._waiting == 7)
        assert not any(one.done() for one in waiting)
        slow.go.set()
        try:
            crowded.parts += [one.result(PATIENCE) for one in waiting]
            assert slow.calls == 1 and crowded.memory.nbytes == 3 * 4096
        finally:
            next_one.go.set()

    crowded.wait_for_growth()
    crowded.assert_apart()


def test_few_or_small_adapters_have_nothing_locked_ahead(crowded, monkeypatch):
    memory = memory_of(crowded.driver)
    held = [memory.take(512) for _ in range(8)]
    assert memory.nbytes == 4096 and not memory._growth.locked(), "nobody knows if there are others to come"

    monkeypatch.setattr(page_locked, "PIECE_BYTES", 2**20)  # pieces have 16 parts
    held += [memory.take(512) for _ in range(32)]
    with memory._growth:
        assert memory.nbytes == sum(map(len, held))


def test_parts_that_come_free_are_taken_back_before_a_piece_is_grown(crowded):
    del crowded.parts[:8]

    for count in (4, 7):
        crowded.take(count)
        crowded.wait_for_growth()
        assert len(crowded.driver.locked) == 2
    assert crowded.driver.settled == 1


def test_a_refusal_ahead_is_told_only_to_one_who_has_to_have_memory(crowded):
    slow = crowded.begin_to_grow(refuses=True)
    slow.go.set()
    crowded.wait_for_growth()

    crowded.take(3)
    crowded.wait_for_growth()
    assert slow.calls == 1, "what was refused is not asked for at every part"
    with pytest.raises(RuntimeError, match="no memory"):
        crowded.take(1)
    assert slow.calls == 2 and crowded.memory.nbytes == 2 * 4096

    slow.refuses = False  # others gave some back
    crowded.take(4)
    crowded.wait_for_growth()
    assert slow.calls == 3 and crowded.memory.nbytes == 3 * 4096
    crowded.take(1)
    crowded.wait_for_growth()
    assert slow.calls == 4, "and it grows ahead again"


def test_one_who_waits_for_a_growth_that_is_refused_tries_itself(crowded):
    slow = crowded.begin_to_grow(refuses=True)
    crowded.take(3)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(crowded.memory.take, 512)
        slow.go.set()
        with pytest.raises(RuntimeError, match="no memory"):
            waiting.result(PATIENCE)
    assert slow.calls == 2


def test_memory_may_be_given_up_while_a_piece_is_being_locked(crowded):
    slow, locked = crowded.begin_to_grow(), crowded.driver.locked
    threads = [thread for thread in threading.enumerate() if thread.name == "minivllm-page-lock"]
    gone = weakref.ref(crowded.memory)

    del crowded.memory, crowded.parts
    assert gone() is None and not locked
    slow.go.set()
    for thread in threads:
        thread.join(PATIENCE)

    assert len(threads) == 1 and not threads[0].is_alive() and not locked


def test_a_process_ends_while_a_piece_is_being_locked():
    code = """if True:
        import threading
        from minivllm.gpu import page_locked
        page_locked.PIECE_BYTES = 4096
        begun = threading.Event()
        def lock(piece):
            begun.set()
            return lambda: None
        memory = page_locked.PageLockedMemory(lock, lambda: None)
        held = [memory.take(512) for _ in range(9)]
        begun.clear()
        held += [memory.take(512) for _ in range(4)]
        assert begun.wait()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("seed", range(4))
def test_threads_share_no_byte_and_none_is_lost(driver, monkeypatch, seed):
    """As a model of intervals has it: live parts and free ones cover each piece, each byte once."""
    monkeypatch.setattr(page_locked, "AHEAD", 4)
    refusals, guard = random.Random(seed), threading.Lock()

    def lock(piece):
        with guard:
            refuses = refusals.random() < 0.2
        time.sleep(0.002)
        if refuses:
            raise RuntimeError("no memory")
        return driver.lock(piece)

    memory = PageLockedMemory(lock, lambda: time.sleep(0.0005))
    held = [{} for _ in range(4)]

    def churn(thread):
        rng, own = random.Random(10 * seed + thread), held[thread]
        for number in range(150):
            if own and rng.random() < 0.45:
                key = rng.choice(list(own))
                assert torch.equal(own[key], torch.full_like(own[key], key))
                del own[key]
            with suppress(RuntimeError):
                own[number % 250 + 1] = memory.take(rng.randint(1, 1500)).fill_(number % 250 + 1)
        for key, part in own.items():
            assert torch.equal(part, torch.full_like(part, key))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
    finally:
        sys.setswitchinterval(interval)
    with memory._growth:
        memory._take_back()

    starts = [piece.ctypes.data for piece in memory._pieces]
    places = [(starts[piece] + first, starts[piece] + end) for piece, first, end in memory._free]
    for part in (part for own in held for part in own.values()):
        places.append((part.data_ptr(), part.data_ptr() + -(-len(part) // 256) * 256))
    owners = {piece.ctypes.data: np.zeros(piece.nbytes, dtype=int) for piece in memory._pieces}
    for first, end in places:
        start = max(start for start in starts if start <= first)
        owners[start][first - start : end - start] += 1
        assert end - start <= len(owners[start])
    assert all((of == 1).all() for of in owners.values())
    assert memory.nbytes == sum(driver.locked.values())
