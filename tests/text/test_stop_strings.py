"""Stop strings in a growing text, beside a search of the whole text after every piece."""

import random

import pytest

from minivllm.text.stop_strings import StopStrings


def search(text: str, known: int, strings: list[str]) -> tuple[int, int, str] | None:
    """The string that is complete first past `known` characters: (end, start, string); of several the longest."""
    found = [
        (start + len(string), start, string)
        for string in strings
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > known
    ]
    return min(found, default=None)


def longest_start_at_the_end(text: str, strings: list[str]) -> int:
    return max(
        (n for string in strings for n in range(len(string)) if n <= len(text) and text.endswith(string[:n])),
        default=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_and_what_is_held_back_is_what_a_search_of_the_text_finds(seed):
    rng = random.Random(seed)
    found = 0
    for _ in range(300):
        strings = list({"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 4))})
        stops, text = StopStrings(strings), ""
        for _ in range(8):
            piece = "".join(rng.choices("abc", weights=[5, 5, 1], k=rng.randint(0, 4)))
            may_stop = rng.random() < 0.5
            known, text = len(text), text + piece

            match = stops.take_in(piece, may_stop)

            expected = search(text, known, strings) if may_stop else None
            assert (match and (match.end, match.start, match.string)) == expected, (strings, text)
            if match:
                found += 1
                break
            assert stops.num_begun == longest_start_at_the_end(text, strings), (strings, text)
    assert found > 100


def test_a_long_string_costs_no_more_than_the_text(monkeypatch):
    """Not its length again at every token: of 64 strings as long as may be, looked up character by character."""
    looked_up = 0

    class Counted(str):
        def __getitem__(self, index):
            nonlocal looked_up
            looked_up += 1
            return str.__getitem__(self, index)

    stops = StopStrings([Counted("a" * 1023 + chr(ord("b") + i % 20)) for i in range(64)])
    looked_up = 0

    for _ in range(2000):
        stops.take_in("a")

    assert looked_up <= 64 * 2000 * 4
