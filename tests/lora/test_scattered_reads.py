"""Parts of a file come by few system calls, and into memory that nobody else has."""

import os
import random
import weakref

import pytest

from minivllm.lora import scattered_reads
from minivllm.lora.scattered_reads import Part, read_parts

NBYTES = 300_000


@pytest.fixture
def data():
    return random.Random(7).randbytes(NBYTES)


@pytest.fixture
def file(data, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb", buffering=0) as opened:
        yield opened


@pytest.fixture
def calls(monkeypatch):
    """(offset, bytes) of each call, which may be told to read at most so many bytes (`calls.most`)."""

    class Calls(list):
        most = NBYTES

    calls, preadv = Calls(), os.preadv

    def read(number, buffers, offset):
        left, given = calls.most, []
        for buffer in buffers:
            given.append(memoryview(buffer)[:left])
            left -= len(given[-1])
        calls.append((offset, preadv(number, given, offset)))
        return calls[-1][1]

    monkeypatch.setattr(scattered_reads.os, "preadv", read)
    return calls


def some_parts(rng, count):
    """Anywhere in the file, some of them empty, some over each other, some behind each other."""
    parts, end = {}, 0
    for number in range(count):
        start = end if rng.random() < 0.6 else rng.randrange(NBYTES - 1000)
        end = min(NBYTES, start + rng.choice([0, 1, 7, rng.randrange(1000)]))
        parts[f"part {number}"] = Part(start, end - start, rng.choice("abc"))
    return parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [NBYTES, 600, 1])
def test_every_part_has_its_bytes_however_little_a_call_reads(seed, most, data, file, calls):
    rng = random.Random(seed)
    parts, calls.most = some_parts(rng, 30 if most == 1 else 300), most

    found = read_parts(file, parts)

    assert list(found) == list(parts)
    for name, part in parts.items():
        assert bytes(found[name].tolist()) == data[part.start : part.start + part.nbytes], name


def test_parts_behind_each_other_are_one_call_whatever_order_and_piece_they_have(file, calls):
    order = random.Random(3).sample(range(400), 400)

    read_parts(file, {str(i): Part(1000 + 100 * i, 100, i % 2) for i in order})

    assert calls == [(1000, 40_000)]


def test_bytes_that_no_part_has_are_not_read(file, calls):
    read_parts(file, {"a": Part(50, 10, 0), "b": Part(60, 5, 1), "c": Part(200_000, 10, 0)})

    assert calls == [(50, 15), (200_000, 10)]


def test_more_parts_than_the_system_takes_at_once_are_several_calls(data, file, calls):
    count = 2 * scattered_reads.MOST_BUFFERS + 1

    found = read_parts(file, {str(i): Part(i, 1, 0) for i in range(count)})

    assert bytes(int(found[str(i)]) for i in range(count)) == data[:count]
    assert len(calls) == 3


@pytest.mark.parametrize("start", [NBYTES - 10, NBYTES, NBYTES + 5])
def test_a_file_that_ends_within_a_part_is_an_error(start, file):
    with pytest.raises(EOFError):
        read_parts(file, {"whole": Part(0, 100, 0), "cut": Part(start, 11, 0)})


def test_what_is_read_later_leaves_alone_what_was_read_before(data, file):
    rng, held = random.Random(11), []
    for _ in range(6):
        parts = some_parts(rng, 40)
        held.append((parts, read_parts(file, parts)))
        for parts, found in held:
            for name, part in parts.items():
                assert bytes(found[name].tolist()) == data[part.start : part.start + part.nbytes]


def test_a_piece_is_given_up_with_its_last_part(file):
    found = read_parts(file, {"a1": Part(0, 10, "a"), "b": Part(10, 10, "b"), "a2": Part(20, 10, "a")})
    pieces = {name: weakref.ref(part.untyped_storage()) for name, part in found.items()}

    del found["a1"]
    assert pieces["a2"]() is found["a2"].untyped_storage()
    del found["a2"]

    assert pieces["a1"]() is pieces["a2"]() is None
    assert pieces["b"]() is found["b"].untyped_storage()
