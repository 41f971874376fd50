"""How far long work is: told to whoever listens, else shown."""

import io
from functools import partial

import pytest
from rich.console import Console

from minivllm.commands.serve import loading
from minivllm.progress import followed, told_to
from minivllm.serving.engine_process import EngineProcess
from tests.worlds.engines import make_engine, tiny_world


def test_each_item_is_told_when_it_is_done():
    told, at_work = [], []

    with told_to(lambda *progress: told.append(progress)):
        for item in followed("ab", "Spelling"):
            at_work.append((item, told[-1]))

    assert told == [("Spelling", 0, 2), ("Spelling", 1, 2), ("Spelling", 2, 2)]
    assert at_work == [("a", ("Spelling", 0, 2)), ("b", ("Spelling", 1, 2))]


def test_without_a_listener_nobody_is_told_and_short_work_shows_nothing(capsys):
    told = []
    with told_to(lambda *progress: told.append(progress)):
        pass

    items = list(followed(iter([1, 2]), "Counting", 2))

    assert (items, told) == ([1, 2], [])
    assert capsys.readouterr().err == ""


@pytest.mark.nightly
def test_an_engines_process_tells_how_far_it_is_while_it_is_made(tmp_path_factory):
    world, told = tiny_world(tmp_path_factory), []
    make = partial(make_engine, world.base, None, {"warm_up": True})

    process = EngineProcess(make, on_progress=lambda *progress: told.append(progress))
    process.stop()

    of_weights = [progress for progress in told if progress[0] == "Loading weights"]
    total = of_weights[0][2]
    assert total > 10
    assert [done for _, done, _ in of_weights] == list(range(total + 1))
    assert told[-1] == ("Warming up kernels", 2, 2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_server_shows_what_its_engine_does(is_terminal):
    screen = io.StringIO()

    with loading(Console(file=screen, force_terminal=is_terminal, width=100)) as on_progress:
        on_progress("Loading weights", 30, 272)

    shown = screen.getvalue()
    assert ("Loading weights" in shown and "30/272" in shown) == is_terminal
