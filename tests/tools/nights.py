"""What is too much for a day is done at night, and what is too much for one night in as many as it takes."""

import datetime
from collections.abc import Iterable, Sequence

import pytest


def by_day(values: Iterable, one_in: int = 3, mark: pytest.MarkDecorator = pytest.mark.nightly) -> list:
    """A parameter's values: the first of each `one_in` for `make test`, the others for the night.

    For settings, seeds and shapes that a fault seldom tells apart. The mark `nightly_without_gpu` has all of them by
    day where a GPU runs them.
    """
    return [pytest.param(value, marks=() if n % one_in == 0 else mark) for n, value in enumerate(values)]


def without_gpu_at_night(day: Iterable, *night: object) -> list:
    """A parameter's values: those of `day`, and those of `night`, which run at night alone where no GPU does."""
    return [*day, *(pytest.param(value, marks=pytest.mark.nightly_without_gpu) for value in night)]


def of_night(things: Sequence, nights: int, day: datetime.date | None = None) -> list:
    """Those whose turn it is: all of them in `nights` nights that follow each other, each once."""
    turn = (day or datetime.date.today()).toordinal() % nights
    return list(things[turn::nights])
