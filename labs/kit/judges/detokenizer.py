"""Open exercise of phase 09: the text of many answers at once, token by token, with few tokens decoded."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random
from types import ModuleType

from labs.kit.judges import Refused

TITLE = "text while tokens come, with few of them decoded"
UNIT = "tokens decoded, by token of the answers"
BUDGET = 4.0

WORDS = 1200
ANSWERS = 24
LETTERS = "abcdefghijklmnopqrstuvwxyzéßñ漢字語🙂"

Decode = Callable[[list[int]], str]


class Vocabulary:
    """Tokens are bytes, as in a byte-level BPE: words with or without a space before them, and all single bytes."""

    def __init__(self, rng: Random) -> None:
        words = [rng.choice(["", " ", " "]) + _word(rng) for _ in range(WORDS)]
        self.words = [word.encode() for word in words]
        self.bytes_of = [bytes([n]) for n in range(256)] + self.words
        rng.shuffle(self.bytes_of)
        self.id_of = {found: token for token, found in enumerate(self.bytes_of)}

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are no whole character are "\ufffd". A space before the first word of a text is left out."""
        text = b"".join(map(self.bytes_of.__getitem__, tokens)).decode("utf-8", errors="replace")
        return text.removeprefix(" ")

    def answer(self, rng: Random) -> list[int]:
        """Words, the common ones often; some characters byte by byte; now and then a byte that belongs nowhere.

        Every other answer ends within a character.
        """
        tokens: list[int] = []
        weights = list(accumulate(1 / (rank + 1) for rank in range(WORDS)))
        for _ in range(rng.randint(120, 220)):
            chance = rng.random()
            if chance < 0.9:
                [found] = rng.choices(self.words, cum_weights=weights)
                tokens.append(self.id_of[found])
            else:
                spelled = rng.choice("é語🙂").encode() if chance < 0.99 else b"\x9f"
                tokens += [self.id_of[bytes([byte])] for byte in spelled]
        torn = [self.id_of[bytes([byte])] for byte in "🙂".encode()[:2]]
        return tokens + torn * (rng.random() < 0.5)


def _word(rng: Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 7)))


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """What `decode` was given, by tokens that came; Refused where text is wrong, or comes later than it could."""
    vocabulary, decoded = Vocabulary(rng), [0]

    def decode(tokens: list[int]) -> str:
        decoded[0] += len(tokens)
        return vocabulary.decode(tokens)

    detokenizer = load().Detokenizer(decode)
    answers = {name: vocabulary.answer(rng) for name in rng.sample(range(10**6), ANSWERS)}
    given = dict.fromkeys(answers, "")
    for name, known in _turns(answers, rng):
        given[name] += detokenizer.push(name, known[-1])
        _check(name, given[name], vocabulary.decode(known), vocabulary.decode(answers[name]))
        if known == answers[name]:
            given[name] += detokenizer.finish(name)
            if given[name] != vocabulary.decode(known):
                raise Refused(f"the text of answer {name} ended as {given[name][-30:]!r}")
    return decoded[0] / sum(map(len, answers.values()))


def _turns(answers: dict[int, list[int]], rng: Random) -> Iterator[tuple[int, list[int]]]:
    """Whose token comes next, and all tokens of that answer so far: in rounds, of some of the answers each."""
    counts = dict.fromkeys(answers, 0)
    while counts:
        for name in [name for name in counts if rng.random() < 0.8]:
            counts[name] += 1
            yield name, answers[name][: counts[name]]
            if counts[name] == len(answers[name]):
                del counts[name]


def _check(name: int, given: str, so_far: str, whole: str) -> None:
    """Text is given at once unless it ends in what later tokens may complete, and nothing is taken back."""
    if not so_far.endswith("\ufffd") and given != so_far:
        raise Refused(f"answer {name} is {so_far[-30:]!r} by now, and {given[-30:]!r} was given")
    if not whole.startswith(given):
        raise Refused(f"of answer {name} {given[-30:]!r} was given, which it never says")
