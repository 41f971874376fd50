"""What is too much for one night is done in as many nights as it takes."""

import datetime
from collections.abc import Sequence


def of_night(things: Sequence, nights: int, day: datetime.date | None = None) -> list:
    """Those whose turn it is: all of them in `nights` nights that follow each other, each once."""
    turn = (day or datetime.date.today()).toordinal() % nights
    return list(things[turn::nights])
