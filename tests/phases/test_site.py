"""The site builds without a warning or a dead link, and its reference names modules that exist."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = re.compile(r"^\.\. automodule:: (\S+)$", re.M)


def test_the_reference_names_modules_that_exist_each_once():
    """`make docs` refuses anything else; here it is told in every run."""
    modules = Counter(MODULE.findall((ROOT / "docs" / "api.md").read_text()))

    assert len(modules) > 50
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name, count in modules.items() if count > 1] == []


@pytest.mark.nightly
def test_the_site_builds_without_a_warning_or_a_dead_link_and_folds_its_answers(tmp_path):
    options = ("-q", "-W", "--keep-going", "-b", "html", "-c", "docs")
    command = [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path)]

    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "docs" / "index.html").stat().st_size > 5_000
    page = (tmp_path / "solutions" / "03_cpu_punica" / "README.html").read_text()
    answers = page.split("<h2>")[1:]
    assert len(answers) == 6
    assert all(answer.index("<details") < answer.index("<pre") for answer in answers)
    assert dead_links(tmp_path) == []


class Page(HTMLParser):
    """What a page links to, and what links may lead to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def dead_links(site: Path) -> list[str]:
    """`page: link` of each link within the site that leads to no file, or to no place in it."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            has_place = target not in pages or unquote(parts.fragment) in pages[target].places
            if not (target.exists() and has_place):
                dead.append(f"{path.relative_to(site.resolve())}: {link}")
    return sorted(dead)


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">1</a> <a href="b.html#gone">2</a> <p id="me">')
    (tmp_path / "b.html").write_text(
        '<p id="here"><a href="a.html">3</a><a href="c.html">4</a><a href="#">5</a><a href="https://x.org/y">6</a>'
    )

    assert dead_links(tmp_path) == ["a.html: b.html#gone", "b.html: c.html"]
