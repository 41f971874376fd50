"""Chapters speak of every exercise, cite what exists, and give no answer away before the labs.

A chapter has two pages: README.md, and in_vllm.md for after the labs.
"""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from labs.kit.regions import PHASES, read_engine
from tests.tools import vllm_names
from tests.tools.vllm_names import CODE_BLOCK, PATH, ROOT, cited, looks_like_a_name, pages, parts_of, since

# Phase 00 is a file to read: it has an exercise, and neither a notebook nor a way through vLLM's source.
CHAPTERS = [path for path in sorted(ROOT.glob("phases/*/README.md")) if path.parent.name != "00_one_file"]
SECOND = [path.with_name("in_vllm.md") for path in CHAPTERS]
BUILT = [path for path in SECOND if path.parent.name in PHASES]  # not that of the incidents
PARTS = ["Idea", "Mini-build", "Labs", "Check yourself", "The second page"]  # answers come after the labs
PARTS_IN_VLLM = ["Names and differences", "Reading vLLM", "Beyond vLLM", "In minivllm", "Side tracks"]
VLLM = vllm_names.known()
DEFINED = re.compile(r"def (\w+)\(")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def short(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def at_0_22_1(path: Path) -> str:
    """A page without what it says of later versions; tests/phases/test_map.py has a test of that."""
    return path.read_text().replace(since(), "")


@pytest.fixture(scope="module")
def our_names():
    """Every identifier of our sources, and the names of our files."""
    folders = ("minivllm", "labs/kit", "tests", "benchmarks", "examples", "adapters", "deploy", "phases")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    return words | {path.name for path in files} | {path.stem for path in files}


def sections(path: Path) -> list[str]:
    return re.findall(r"^## (.*)$", CODE_BLOCK.sub("", path.read_text()), re.M)


@pytest.mark.parametrize("path", CHAPTERS, ids=short)
def test_both_pages_of_a_chapter_have_their_parts_and_a_link_to_the_other(path):
    second = path.with_name("in_vllm.md")

    found = sections(second)

    assert sections(path) == PARTS
    assert found == [part for part in PARTS_IN_VLLM if part in found]
    assert found[0] == "Names and differences"
    assert "(in_vllm.md)" in path.read_text().split("\n## The second page\n")[1]
    assert "(README.md)" in second.read_text().partition("\n## ")[0]


@pytest.mark.parametrize("path", CHAPTERS, ids=short)
def test_a_chapter_has_a_place_for_every_exercise(path):
    exercises = tomllib.loads((ROOT / "labs" / path.parent.name / "hints.toml").read_text())
    labs = path.read_text().split("## Labs")[1].split("## Check yourself")[0]

    assert [number for number in exercises if number not in labs] == []


# They say of names of other versions of vLLM where they are here; tests/vllm has a test of what they say.
OTHER_VERSIONS = {ROOT / "docs" / "names.md", ROOT / "docs" / "documents.md"}


@pytest.mark.parametrize("path", [path for path in pages() if path not in OTHER_VERSIONS], ids=short)
def test_names_and_files_of_vllm_that_are_cited_exist(path, our_names):
    known = our_names | VLLM["names"] | set(dir(torch)) | set(dir(torch.Tensor))
    tokens = cited(at_0_22_1(path))
    names = [token for token in tokens if looks_like_a_name(token)]
    files = {token.rstrip("/") for token in tokens if PATH.fullmatch(token)}

    assert [n for n in names if not set(parts_of(n)) <= known and not (ROOT / n).exists()] == []
    assert files - VLLM["paths"] == set()


@pytest.mark.parametrize("path", pages(), ids=short)
def test_relative_links_lead_somewhere(path):
    targets = [
        link.partition("#")[0]
        for link in LINK.findall(CODE_BLOCK.sub("", path.read_text()))
        if "://" not in link
    ]

    assert [target for target in targets if target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", [*CHAPTERS, *SECOND], ids=short)
def test_a_chapter_holds_no_answer(path):
    """An exercise's code stands in solutions/, one link away: nobody reads it by accident."""
    asked = {name for exercise in read_engine().values() for name in DEFINED.findall(exercise.code())}

    shown = {name for block in CODE_BLOCK.findall(path.read_text()) for name in DEFINED.findall(block)}

    assert asked
    assert shown & asked == set()


@pytest.mark.parametrize("path", sorted(ROOT.glob("phases/*/README.md")), ids=short)
def test_a_chapter_links_no_file_with_answers_before_its_labs(path):
    """A module in which one of the phase's exercises is whole, or a page of solutions. Phase 00 is about its file."""
    whole = {
        ROOT / (exercise.module.replace(".", "/") + ".py")
        for exercise in read_engine().values()
        if exercise.phase == path.parent.name and exercise.phase != "00_one_file"
    }
    before = path.read_text().partition("\n## Labs\n")[0]

    linked = {(path.parent / link.partition("#")[0]).resolve() for link in LINK.findall(before)}

    assert linked & whole == set()
    assert [page for page in linked if page.is_relative_to(ROOT / "solutions")] == []


@pytest.mark.parametrize("path", BUILT, ids=short)
def test_a_chapter_leads_through_vllms_source_and_a_test_proves_each_answer(path):
    section = path.read_text().split("\n## Reading vLLM\n")[1].partition("\n## ")[0]
    tests = "".join(
        test.read_text() for test in (ROOT / "tests" / f"phase_{path.parent.name[:2]}").glob("test_*.py")
    )

    answers = section.split("<summary>answer</summary>")[1:]

    assert re.search(r"Open `vllm/[\w/]+\.py`", section), "the file to begin with"
    assert len(answers) >= 2
    for answer in answers:
        named = re.findall(r"`(test_\w+)`", answer)
        assert named, answer
        assert [name for name in named if f"def {name}(" not in tests] == []
