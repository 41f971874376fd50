"""The four tasks of the demo adapters: data made by code, the prompt and the score. Needs only Python.

A sentence is a frame with values put into its gaps. Held-out examples use frames and values that training
never sees; only small closed classes (months, number words, how many rows) are shared.
"""

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass

from adapters.recipe import frames, values

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# What the base model is told in addition, to be fair to it.
INSTRUCTIONS = {
    "json": 'Write the order as one line of JSON with the keys "customer", "count" and "price", like '
    '{"customer": "Ann Lee", "count": 3, "price": 1.20}, and nothing else.',
    "sql": "Write one SQL query, and nothing else, that answers the question from the tables "
    "employees(name, city, age, salary) and products(name, category, price, stock).",
    "bullets": "List every thing on a line of its own as a dash, the thing, a colon and how many there are, "
    'in digits, like "- pens: 3", and write nothing else.',
    "dates": "Write the period as an ISO 8601 interval, like 1999-12-24/2000-01-06, and nothing else.",
}
TASKS = tuple(INSTRUCTIONS)
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Example:
    """What the user writes and the one right answer."""

    text: str
    answer: str


def prompt(task: str, text: str, instructed: bool = False) -> str:
    """The model's chat template around `text`, and for the base the task's instruction before it."""
    content = f"{INSTRUCTIONS[task]}\n{text}" if instructed else text
    turns = (("system", SYSTEM), ("user", content))
    chat = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
    return chat + "<|im_start|>assistant\n"


def examples(task: str, n: int, split: str = "heldout", seed: int = 0) -> list[Example]:
    """n different examples of a task from split "train" or "heldout", the same for the same arguments."""
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    if split not in ("train", "heldout"):
        raise ValueError(f"no split {split!r}; there are train and heldout")
    rng = random.Random(f"{task}/{split}/{seed}")
    found: dict[str, Example] = {}
    while len(found) < n:
        example = _MAKERS[task](rng, split)
        found.setdefault(example.text, example)
    return list(found.values())


def is_right(output: str, answer: str) -> bool:
    """Exact match, but for blanks around the output."""
    return output.strip() == answer


def _json(rng: random.Random, split: str) -> Example:
    name = f"{values.pick(rng, values.FIRST_NAMES, split)} {values.pick(rng, values.LAST_NAMES, split)}"
    item = _plural(values.pick(rng, values.NOUNS, split))
    count = rng.choice(values.COUNTS.of(split))
    price = f"{rng.choice(values.UNIT_PRICES.of(split)) / 100:.2f}"
    text = rng.choice(frames.ORDERS.of(split)).format(name=name, item=item, count=count, price=price)
    answer = f'{{"customer": "{name}", "count": {count}, "price": {price}}}'
    return Example(_sentence(text), answer)


def _sql(rng: random.Random, split: str) -> Example:
    table = rng.choice(("employees", "products"))
    kind = rng.choice(tuple(frames.QUESTIONS))
    column = rng.choice(("age", "salary") if table == "employees" else ("price", "stock"))
    n = rng.randint(2, 20)
    phrases, clauses = _conditions(rng, split, table, rng.randint(1, 2))
    head = rng.choice(frames.QUESTIONS[kind].of(split))
    text = head.format(things=table, conditions=" and ".join(phrases), column=column, n=n)
    selected = {"count": "COUNT(*)", "average": f"AVG({column})"}.get(kind, "name")
    ending = f" ORDER BY {column} DESC LIMIT {n}" if kind == "top" else ""
    return Example(text, f"SELECT {selected} FROM {table} WHERE {' AND '.join(clauses)}{ending};")


def _conditions(rng: random.Random, split: str, table: str, n: int) -> tuple[list[str], list[str]]:
    """n conditions on different columns of a table: as phrases and as SQL."""
    columns = sorted({column for of, column, _ in frames.CONDITIONS if of == table})
    phrases, clauses = [], []
    for column in rng.sample(columns, n):
        operator = rng.choice([op for of, name, op in frames.CONDITIONS if (of, name) == (table, column)])
        pool = values.SQL_VALUES[column]
        value = values.pick(rng, pool, split) if operator == "=" else rng.choice(pool.of(split))
        phrases.append(rng.choice(frames.CONDITIONS[table, column, operator].of(split)).format(value=value))
        clauses.append(f"{column} {operator} " + (f"'{value}'" if isinstance(value, str) else str(value)))
    return phrases, clauses


def _bullets(rng: random.Random, split: str) -> Example:
    nouns: list[str] = []
    length = rng.randint(2, 5)
    while len(nouns) < length:
        noun = values.pick(rng, values.NOUNS, split)
        nouns += [] if noun in nouns else [noun]
    counts = [rng.randint(1, 10) for _ in nouns]
    phrases = [_counted(rng, noun, count) for noun, count in zip(nouns, counts, strict=True)]
    text = rng.choice(frames.LISTS.of(split)).format(items=f"{', '.join(phrases[:-1])} and {phrases[-1]}")
    things = [noun if count == 1 else _plural(noun) for noun, count in zip(nouns, counts, strict=True)]
    answer = "\n".join(f"- {thing}: {count}" for thing, count in zip(things, counts, strict=True))
    return Example(_sentence(text), answer)


def _dates(rng: random.Random, split: str) -> Example:
    start = datetime.date(rng.choice(values.YEARS.of(split)), rng.randint(1, 12), rng.randint(1, 28))
    end = start + datetime.timedelta(days=rng.randint(2, 300))
    if end.year not in values.YEARS.of(split):
        end = start.replace(month=12, day=rng.randint(29, 31))
    style = rng.choice(_DATE_STYLES)
    text = rng.choice(frames.PERIODS.of(split)).format(
        event=values.pick(rng, values.EVENTS, split), start=style(start), end=style(end)
    )
    return Example(_sentence(text), f"{start}/{end}")


def _ordinal(day: int) -> str:
    return f"{day}{'th' if 11 <= day <= 13 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


_DATE_STYLES: tuple[Callable[[datetime.date], str], ...] = (
    lambda date: f"{date:%B} {date.day}, {date.year}",
    lambda date: f"{date.day} {date:%B} {date.year}",
    lambda date: f"{date:%B} {_ordinal(date.day)}, {date.year}",
    lambda date: f"the {_ordinal(date.day)} of {date:%B} {date.year}",
    lambda date: f"{date:%b} {date.day} {date.year}",
)


def _plural(noun: str) -> str:
    """ "lamp" -> "lamps", "jar of honey" -> "jars of honey"."""
    head, of, rest = noun.partition(" of ")
    return f"{head}s{of}{rest}"


def _counted(rng: random.Random, noun: str, count: int) -> str:
    """ "an apple", "one apple", "three apples" or "3 apples"."""
    if count == 1:
        return f"{rng.choice(('an' if noun[0] in 'aeiou' else 'a', 'one'))} {noun}"
    return f"{rng.choice((NUMBER_WORDS[count - 2], str(count)))} {_plural(noun)}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


_MAKERS = {"json": _json, "sql": _sql, "bullets": _bullets, "dates": _dates}
