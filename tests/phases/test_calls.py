"""docs/calls.md: each function of its trees is entered, and from the function that the tree says."""

import re
import sys
from pathlib import Path

import pytest

from minivllm import EngineArgs, LLMEngine
from tests.worlds.engines import greedy, run
from tests.worlds.small import OPTIONS, SmallWorld

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "calls.md").read_text(encoding="utf-8")
TREES = dict(re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)^```", PAGE, re.M | re.S))


def edges(tree: str) -> list[tuple[str | None, str]]:
    """(caller, callee) of each line of a tree; a first line has no caller."""
    found, above = [], []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        found.append((above[depth - 1] if depth else None, name))
        above[depth:] = [name]
    return found


class Entered:
    """Inside: (caller or a caller of its caller, callee), of all functions by their qualified names."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str | None, str]] = set()

    def __enter__(self) -> "Entered":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, _: object) -> None:
        if event != "call" or "minivllm" not in frame.f_code.co_filename:
            return
        name, caller = frame.f_code.co_qualname, frame.f_back
        self.pairs.add((None, name))
        while caller is not None:
            self.pairs.add((caller.f_code.co_qualname, name))
            caller = caller.f_back


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """An engine's start, and a life in which two adapters share one slot."""
    world = SmallWorld(tmp_path_factory.mktemp("calls"))
    options = {**OPTIONS, "max_loras": 1, "max_cpu_loras": 2, "punica_backend": "grouped"}
    args = EngineArgs(str(world.folder / "base"), **options)
    with Entered() as entered:
        engine = LLMEngine.from_engine_args(args)
        for number in (1, 2):
            engine.add_request(str(number), [5, 6, 7], greedy(2), lora_request=world.request(number))
        run(engine)
    return entered.pairs


@pytest.mark.parametrize("title", TREES)
def test_a_tree_has_the_calls_that_an_engine_makes(entered, title):
    assert [edge for edge in edges(TREES[title]) if edge not in entered] == []


def test_there_is_a_tree_for_each_part_of_an_adapters_way():
    assert len(TREES) == 5 and all(len(edges(tree)) > 4 for tree in TREES.values())
