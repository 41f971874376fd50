"""Bug hunts: incidents of released servers as faults of this engine, and what a learner writes against each."""

import ast
import codecs
import hashlib
import json
import re
import tomllib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labs.kit.hunt_files import handed_out, shown_in, whole
from labs.kit.overlay import Source, engine_file
from labs.kit.regions import ROOT, LabError

if TYPE_CHECKING:
    from labs.kit.progress import Progress

PHASE = "08_incidents"
_TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")  # as docs/incidents.md cites one
_MARKERS = re.compile(r"^ *# (region lab .*|endregion)\n", re.MULTILINE)

STARTER = '''"""Hunt {number}: {title}

`lab hunt {id}` tells the symptom, `lab hint {number}` helps, `lab hunt {id} --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_{id:02}(world):
    raise Todo("lab {number}: {title}")
'''


class Edit(NamedTuple):
    """`old` is in the module exactly once; `new` takes its place."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One form of a mistake.

    what   the mistake, in a sentence
    lets   of a variant: what users would see, in words that follow "an engine where"
    means  of a sound engine: what a test that fails there asks for, and why no incident promises it
    """

    name: str
    what: str
    edits: list[Edit]
    lets: str = ""
    means: str = ""

    def texts(self) -> dict[str, str]:
        """Every module that it changes, with the mistake in it. LabError where an edit does not fit the engine."""
        texts: dict[str, str] = {}
        for module, old, new in self.edits:
            text = texts.get(module) or engine_file(module).read_text(encoding="utf-8")
            if text.count(old) != 1:
                raise LabError(
                    f"fault {self.name}: its old text is in {module} {text.count(old)} times, not once"
                )
            texts[module] = text.replace(old, new)
        for module, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise LabError(
                    f"fault {self.name}: it leaves a {module} that does not parse: {error}"
                ) from error
        return texts

    def sources(self) -> dict[str, Source]:
        """What is loaded in the place of every module that it changes. LabError as of `texts`."""
        return {
            # No such file: it is read from linecache.
            module: Source(f"{engine_file(module)} [hunt]", _MARKERS.sub("", text))
            for module, text in self.texts().items()
        }


def _form(prefix: str, table: dict[str, Any]) -> Fault:
    edits = [Edit(e["module"], e["old"], e["new"]) for e in table.get("edit") or [table]]
    return Fault(prefix + table["name"], table["what"], edits, table.get("lets", ""), table.get("means", ""))


@dataclass(frozen=True)
class Hunt:
    """number: such as `8.7`, where 7 is the incident's in docs/incidents.md

    slug        names the learner's files
    difficulty  1 to 3
    symptom     as its users reported it
    """

    number: str
    title: str
    slug: str
    difficulty: int
    minutes: int
    symptom: str
    hints: list[str]
    root: Path = field(default=ROOT, repr=False)

    phase = PHASE

    @property
    def id(self) -> int:
        return int(self.number.partition(".")[2])

    @property
    def folder(self) -> Path:
        return self.root / "labs" / PHASE

    @property
    def test_file(self) -> Path:
        """Where the learner writes the failing test."""
        return self.folder / f"test_{self.id:02}_{self.slug}.py"

    @property
    def starter(self) -> str:
        """What that file holds at the start."""
        return STARTER.format(number=self.number, title=self.title, id=self.id)

    @cached_property
    def _sealed(self) -> dict[str, Any]:
        path = self.folder / "faults" / f"{self.id:02}.rot13"
        return tomllib.loads(codecs.decode(path.read_text(encoding="utf-8"), "rot13"))

    @cached_property
    def faults(self) -> list[Fault]:
        """The incident first, then other forms of the same mistake."""
        return self._forms("fault")

    @cached_property
    def right_forms(self) -> list[Fault]:
        """Edits after which the engine is as right as before: a test of what it does passes on them, too."""
        return self._forms("right")

    def _forms(self, kind: str) -> list[Fault]:
        return [_form(f"{self.number} ", table) for table in self._sealed.get(kind, [])]

    @cached_property
    def sound_engines(self) -> list[Fault]:
        """As `right_forms`, of the engines in `sound.toml`, on which tests of nearly all hunts pass."""
        tables = tomllib.loads((self.folder / "sound.toml").read_text(encoding="utf-8"))["engine"]
        return [_form("", table) for table in tables if self.id not in table["but_for"]]

    @property
    def kin(self) -> list[int]:
        """Hunts whose fault a right test of this one may meet as well."""
        return self._sealed.get("kin", [])

    def own_tests(self) -> list[tuple[str, str]]:
        """(file, function) of tests that a fix must pass: the incident's, and those of what it may not break.

        A function `*` is all of a file.
        """
        page = (self.root / "docs" / "incidents.md").read_text(encoding="utf-8")
        row = re.search(rf"^\| {self.id} \|.*$", page, re.MULTILINE)[0]
        cited = [(path, name) for name, path in _TEST.findall(row) if not path.startswith("tests/gpu")]
        return cited + [tuple(test.split("::")) for test in self._sealed.get("keeps", [])]

    @property
    def modules(self) -> list[str]:
        """Those that the incident's fault is in."""
        return list(dict.fromkeys(edit.module for edit in self.faults[0].edits))

    def broken(self) -> dict[str, Source]:
        """The engine's modules with the incident's fault in them."""
        return self.faults[0].sources()

    def fix_file(self, module: str) -> Path:
        """Where the learner mends a module."""
        return self.folder / "fixes" / f"{self.id:02}_{module.rpartition('.')[2]}.py"

    def handed_out(self, solved: Collection[str] = ()) -> dict[str, str]:
        """Each broken module as a learner gets it who has solved these exercises, see `hunt_files`."""
        return {
            module: handed_out(engine_file(module).read_text(encoding="utf-8"), text, module, solved)
            for module, text in self.faults[0].texts().items()
        }

    def is_as_handed_out(self) -> bool:
        """Whether nobody has changed a copy, whatever was solved when it was written."""
        texts = self.fix_texts()
        try:
            solved = {number for module, text in texts.items() for number in shown_in(text, module)}
        except LabError:
            return False
        return texts == self.handed_out(solved)

    def answers(self, solved: Collection[str]) -> set[str]:
        """The exercises whose code is in the copies, or will be for a learner who has solved these."""
        texts, found = {}, set()
        with suppress(LabError):  # somebody has edited our code where the fault would be
            texts = self.handed_out(solved)
        for module, text in (texts | self.fix_texts()).items():
            with suppress(LabError):  # a mark was lost: the grade says so
                found |= shown_in(text, module)
        return found

    def fix_texts(self) -> dict[str, str]:
        """The learner's copies of the broken modules as they stand, as far as they are there."""
        files = {module: self.fix_file(module) for module in self.modules}
        return {module: path.read_text(encoding="utf-8") for module, path in files.items() if path.is_file()}

    def fixes(self) -> dict[str, Source]:
        """The learner's copies, with our code in the place of what is left out of them.

        LabError where the lines that say what is left out are not there any more.
        """
        found = {}
        for module, text in self.fix_texts().items():
            path, sound = self.fix_file(module), engine_file(module).read_text(encoding="utf-8")
            try:
                found[module] = Source(str(path), *whole(text, sound, path.name))
            except LabError as error:
                raise LabError(
                    f"{path.relative_to(self.root)}: leave the lines '# region lab ...' and '# endregion' as they "
                    "were, since code that is left out is put back between them; "
                    f"`lab reset {self.number}` begins again, and keeps a copy"
                ) from error
        return found

    def hand_out(self, solved: Collection[str] = ()) -> list[Path]:
        """Write a copy of each broken module for the learner to mend, unless there is one. Returns all of them.

        solved   exercises whose code may be in it
        """
        for module, text in self.handed_out(solved).items():
            path = self.fix_file(module)
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")
        return [self.fix_file(module) for module in self.modules]

    def test_text(self) -> str:
        try:
            return self.test_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LabError(
                f"{self.test_file.relative_to(self.root)} is missing; `lab reset {self.number}` writes it"
            ) from None

    def digest(self, with_fixes: bool = True) -> str:
        """Of all that the learner has written for it, or of the test alone."""
        texts = [self.test_text(), *(self.fix_texts().values() if with_fixes else ())]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def state(self, progress: "Progress") -> str:
        """todo, while the starter stands untouched; passed, if these very files did; else started."""
        if not self.test_file.is_file() or self.test_text() == self.starter:
            return "todo"
        return "passed" if progress.passed.get(self.number) == self.digest() else "started"


def read_hunts(root: Path = ROOT) -> dict[str, Hunt]:
    """Every hunt by its number, in order."""
    path = root / "labs" / PHASE / "hints.toml"
    if not path.is_file():
        return {}
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    hunts = {number: Hunt(number, **table, root=root) for number, table in tables.items()}
    return dict(sorted(hunts.items(), key=lambda item: item[1].id))


def choose_hunts(which: str) -> list[Hunt]:
    """Those of the phase for `8`, one for `8.7`. LabError for what is neither."""
    hunts = read_hunts()
    found = [hunt for number, hunt in hunts.items() if which in ("8", number)]
    if not found:
        numbers = ", ".join(str(hunt.id) for hunt in hunts.values())
        raise LabError(f"there is no hunt '{which.removeprefix('8.')}': there are {numbers}")
    return found


def is_hunt(which: str | None) -> bool:
    """Whether somebody who names this means phase 8, or a hunt of it."""
    return which is not None and which.partition(".")[0] == "8"
