"""Bug hunts: each fault applies and is seen, and the grader takes right tests and right fixes alone."""

import ast
import io
import json
import re
import sys
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from tokenize import COMMENT, generate_tokens

import pytest

from labs.kit import hunt_grade
from labs.kit.forks import Job, Outcome, Result
from labs.kit.hunt import PHASE, read_hunts
from labs.kit.hunt_files import WITH_DOCSTRING, handed_out, whole
from labs.kit.hunt_rules import source_reading
from labs.kit.overlay import Source, engine_file
from labs.kit.regions import LabError, read_engine
from tests.tools.nights import of_night
from tests.worlds.hunts import HuntWorld

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from checkout import Checkout, judged

ROOT = Path(__file__).resolve().parents[2]
HUNTS = read_hunts()
SOLUTIONS = ROOT / "solutions" / PHASE
each = pytest.mark.parametrize("hunt", HUNTS.values(), ids=lambda hunt: hunt.number)


def reference(hunt):
    """Our own test for a hunt."""
    return SOLUTIONS / "tests" / hunt.test_file.name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """One with a few of the hunts: a right test is run on the faults of all others."""
    checkout = Checkout(tmp_path_factory.mktemp("hunts"))
    path = checkout.root / "labs" / PHASE / "hints.toml"
    first, *tables = re.split(r'(?m)^(?=\["8)', path.read_text())
    few = [
        table
        for table in tables
        if table.startswith(('["8.1"]', '["8.3"]', '["8.9"]', '["8.14"]', '["8.17"]'))
    ]
    path.write_text(first + "".join(few))
    return checkout


def test_there_is_a_hunt_for_every_incident_of_the_page():
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "incidents.md").read_text(), re.MULTILINE)

    # 24 needs several GPUs, 27 a server with hundreds of adapters.
    assert [hunt.id for hunt in HUNTS.values()] == [int(row) for row in rows if row not in ("24", "27")]


@each
def test_a_hunt_has_all_that_its_hunter_needs_and_its_starter_tells_nothing_of_the_fault(hunt):
    assert len(hunt.symptom.split()) >= 20
    assert 1 <= hunt.difficulty <= 3
    assert 10 <= hunt.minutes <= 60
    assert len(hunt.hints) == 3
    assert all(hint.strip() for hint in hunt.hints)
    assert f'raise Todo("lab {hunt.number}: ' in hunt.starter
    assert not any(module.rpartition(".")[2] in hunt.starter for module in hunt.broken())


@each
def test_a_hunt_has_a_post_mortem(hunt):
    text = (SOLUTIONS / "README.md").read_text()
    part = re.search(rf"^## {re.escape(hunt.number)} .*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    row = re.search(rf"^\| {hunt.id} \|.*$", (ROOT / "docs/incidents.md").read_text(), re.MULTILINE)[0]

    assert part, "no post-mortem"
    assert len(part[0].split()) >= 80
    assert [number for number in re.findall(r"\[#(\d+)\]", row) if f"#{number}" not in part[0]] == []
    [upstream] = re.findall(r"^\*\*Upstream today\.\*\* (.*)$", part[0], re.MULTILINE)
    assert upstream.startswith("No open issue is known.") or re.search(
        r"\[#\d+\]\(https://github\.com/", upstream
    )


@each
def test_every_form_of_a_fault_fits_the_engine_and_changes_it(hunt):
    names = [fault.name for fault in hunt.faults]

    for fault in [*hunt.faults, *hunt.right_forms, *hunt.sound_engines]:
        for module, source in fault.sources().items():
            assert source.text != engine_file(module).read_text(), fault.name
        assert fault.what.endswith(".")
    assert len(names) == len(set(names)) == 3


@each
def test_what_judges_a_fix_is_there(hunt):
    """A test that is named and gone refuses nobody, and half a fix is taken."""
    for path, name in hunt.own_tests():
        tree = ast.parse((ROOT / path).read_text())
        named = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name == "*" or name.rpartition("::")[2] in named, f"{path} has no {name}"


@each
def test_every_variant_says_what_its_users_see_and_nothing_of_the_code(hunt):
    """A test that passes there is told so: in which direction it is too weak, and not how the fault is made."""
    own, *variants = hunt.faults
    words = {word for f in hunt.faults for edit in f.edits for word in re.findall(r"\w*_\w+", edit.new)}
    symptom = {"load_inplace", "target_modules"}  # which users write themselves

    assert own.lets == ""
    for variant in variants:
        assert 6 <= len(variant.lets.split()) <= 32, variant.name
        assert variant.lets[0].islower() or variant.lets.startswith("LoRA"), variant.name
        assert not variant.lets.endswith("."), variant.name
        assert set(re.findall(r"\w+", variant.lets)) & words <= symptom, variant.name
    assert len({variant.lets for variant in variants}) == len(variants)


@pytest.mark.nightly
def test_a_weak_test_is_told_which_variants_it_lets_pass(checkout):
    """One that sees modules with a rank of their own alone."""
    path = checkout.root / "test_weak.py"
    path.write_text(
        'pytest_plugins = "tests.worlds.hunts"\n\n\ndef test_hunt_09(world):\n'
        "    from minivllm.lora.peft_helper import PEFTHelper\n"
        "    helper = PEFTHelper(8, 8, ['q_proj'], rank_pattern={'q_proj': 2})\n"
        "    assert helper.scaling('layers.0.q_proj', 2) == 4\n"
    )

    [problems] = graded(checkout, "8.9", path)

    assert all("modules with an alpha of their own get everybody's" in problem for problem in problems)


def graded(checkout, number, *paths):
    """What is wrong with tests for a hunt, in a process of its own: no module of the engine is loaded in it."""
    code = (
        "import json\n"
        "from pathlib import Path\n"
        "from labs.kit.hunt import read_hunts\n"
        "from labs.kit.hunt_grade import grade_test\n"
        f"for path in map(Path, {list(map(str, paths))}):\n"
        "    limit = 0.5 if 'never' in path.name else 15\n"
        f"    print(json.dumps(grade_test(read_hunts()['{number}'], path, limit)[0]))\n"
    )
    result = checkout.execute(code)
    assert result.returncode == 0, result.stderr
    return list(map(json.loads, result.stdout.splitlines()))


def without_docstrings(text):
    """A module's syntax tree, in which nothing is left that is only read by people."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


@each
def test_what_is_mended_says_nothing_of_what_is_right(hunt):
    """Docstrings and comments do, and so do the titles of exercises."""
    for text in hunt.handed_out().values():
        comments = [t.string for t in generate_tokens(io.StringIO(text).readline) if t.type == COMMENT]

        documented = [
            n for n in ast.walk(ast.parse(text)) if isinstance(n, WITH_DOCSTRING) and ast.get_docstring(n)
        ]
        assert documented == []
        allowed = r"# endregion|# region lab [\d.]+: code of an exercise|# lab [\d.]+: our code runs here"
        assert [comment for comment in comments if not re.fullmatch(allowed, comment)] == []


@each
def test_what_is_mended_holds_no_answer_of_an_exercise_that_the_fault_is_not_in(hunt):
    for module, text in hunt.handed_out().items():
        given = bodies(text)
        for number, exercise in read_engine().items():
            changed = [edit for edit in hunt.faults[0].edits if edit.module == module]
            if exercise.module != module or any(in_regions(exercise, edit.old) for edit in changed):
                continue

            answers = bodies(exercise.code())

            assert answers
            assert answers & given == set(), number
            assert f"lab {number}: our code runs here" in text


def bodies(text):
    """What functions do, each with its name."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    said = [ast.get_docstring(node) is not None for node in functions]
    return {
        (n.name, ast.unparse(n.body[has_docstring:]))
        for n, has_docstring in zip(functions, said, strict=True)
    }


def in_regions(exercise, old):
    """Whether the text that a fault replaces, which is in the module once, reaches into one of the regions."""
    first = exercise.text[: exercise.text.index(old)].count("\n")
    last = first + old.rstrip("\n").count("\n") + 1
    return any(first < region.stop and region.start < last for region in exercise.regions)


@each
def test_what_is_mended_is_the_broken_module_once_our_code_is_put_back(hunt):
    for module, text in hunt.handed_out().items():
        sound, broken = engine_file(module).read_text(), hunt.faults[0].texts()[module]

        put_together, lines = whole(text, sound, module)

        assert without_docstrings(put_together) == without_docstrings(broken)
        if lines is not None:
            assert len(lines) == len(put_together.split("\n"))
            assert max(lines) <= len(text.split("\n"))


def test_faults_are_not_read_by_accident():
    for path in (ROOT / "labs" / PHASE / "faults").iterdir():
        assert "fault" not in path.read_text()


def test_a_fault_that_does_not_fit_any_more_is_named():
    hunt = HUNTS["8.7"]
    [edit] = hunt.faults[0].edits
    stale = type(hunt.faults[0])("8.7 stale", "It was.", [edit._replace(old="no such line\n")])

    with pytest.raises(LabError, match=r"8\.7 stale: its old text is in minivllm\.core\.kv_cache 0 times"):
        stale.sources()


@pytest.mark.nightly
def test_of_our_tests_exactly_those_of_a_hunt_fail_with_its_fault():
    files = tuple(sorted((SOLUTIONS / "tests").glob("test_*.py")))
    jobs = [Job(("none", "sound", []), "8", {}, files=files)]
    for hunt in HUNTS.values():
        for fault in hunt.faults:
            kin = [other.id for other in HUNTS.values() if hunt.id in other.kin or fault != hunt.faults[0]]
            jobs.append(Job((hunt.id, fault.name, kin), "8", fault.sources(), files=files))

    for job, outcome in judged(jobs):
        own, name, kin = job.key
        failed = {int(r.test.split("test_")[1][:2]) for r in outcome.of("failed", "todo")}
        assert outcome.trouble is None, name
        assert len(outcome.results) >= len(files), name
        assert failed <= {own, *kin}, name
        assert (own in failed) == (name != "sound"), name


@pytest.mark.nightly
def test_the_incidents_test_fails_with_the_fault_and_on_what_is_given_to_mend_and_passes_once_that_is_mended():
    jobs = []
    for hunt in HUNTS.values():
        alone, given, mended = replace(hunt), {}, {}
        for module, broken in hunt.faults[0].texts().items():
            sound, path = engine_file(module).read_text(), str(hunt.fix_file(module))
            given[module] = Source(path, *whole(hunt.handed_out()[module], sound, module))
            mended[module] = Source(path, *whole(handed_out(broken, sound, module), sound, module))
        jobs.append(hunt_grade.incident_job(hunt, (hunt.number, "given"), given))
        jobs.append(hunt_grade.incident_job(hunt, (hunt.number, "mended"), mended))
        alone._sealed.pop("keeps", None)  # the tests of what a fix may not break may fail, too
        jobs.append(hunt_grade.incident_job(alone, (hunt.number, "broken"), hunt.broken()))

    passed = {job.key: outcome.passed for job, outcome in judged(jobs)}

    assert passed == {(n, state): state == "mended" for n in HUNTS for state in ("given", "mended", "broken")}


MENDED = ["8.4", "8.8", "8.12", "8.13"]  # half a fix of these was taken once


def statements(lines):
    """The lines of some code, each statement's together."""
    least = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found = []
    for line in lines:
        begins = line[least : least + 1].strip() and not line[least:].startswith(
            ("except", "else", "elif", "finally")
        )
        if begins or not found:
            found.append([])
        found[-1].append(line)
    return found


def mended_in_part(fault):
    """The fault with one of its statements mended: taken out, put back, or as it was. For each, if it has several."""
    halves = []
    for number, edit in enumerate(fault.edits):
        old, new = edit.old.splitlines(True), edit.new.splitlines(True)
        for kind, i, j, k, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            put, taken = statements(new[k:stop]), statements(old[i:j])
            ways = {
                "equal": [],
                "insert": [[one for one in put if one is not mended] for mended in put],
                "delete": [[mended] for mended in taken],
                "replace": [taken],
            }[kind]
            for way in ways:
                text = "".join([*new[:k], *(line for one in way for line in one), *new[stop:]])
                edits = [*fault.edits[:number], edit._replace(new=text), *fault.edits[number + 1 :]]
                halves.append(type(fault)(fault.name, fault.what, [e for e in edits if e.old != e.new]))
    return halves if len(halves) > 1 else []


def test_statements_of_a_fault_are_mended_one_at_a_time():
    fault = HUNTS["8.13"].faults[0]

    halves = mended_in_part(fault)

    left = [[edit.new for edit in half.edits] for half in halves]
    assert len(left) == 4
    assert ["self.active = len" in "".join(text) for text in left] == [True, False, True, True]
    assert ["tiles.roll" in "".join(text) for text in left] == [True, True, False, True]
    assert ['getattr(self, "active"' in "".join(text) for text in left] == [True, True, True, False]


@pytest.mark.parametrize(
    "chosen",
    [MENDED[-1:], pytest.param([n for n in HUNTS if n != MENDED[-1]], marks=pytest.mark.nightly)],
    ids=["one that took half a fix", "all others"],
)
def test_a_fix_of_one_part_of_a_fault_is_refused(chosen):
    """Unless the faults' file says that it is right, and why: `right_alone`, by the statement's number."""
    jobs, right = [], set()
    for hunt in (HUNTS[number] for number in chosen):
        right |= {(hunt.number, int(n)) for n in hunt._sealed.get("right_alone", {})}
        for n, half in enumerate(mended_in_part(hunt.faults[0])):
            jobs.append(hunt_grade.incident_job(hunt, (hunt.number, n), half.sources()))

    taken = {job.key for job, outcome in judged(jobs) if outcome.passed}

    assert len(jobs) > len(chosen) / 4
    assert taken == right


# Fixes that were once taken: what is wrong with each, its hunt, a text of the module, and what the fix has for it.
REFUSED = {
    "without what was right": (
        "8.18",
        "weights_only=False)\n        _refuse_records(data)\n",
        "weights_only=True)\n",
    ),
    "where nothing of an adapter fits": (
        "8.8",
        "        if unknown := [name for name in lora.loras if end_of(name) not in offered]:\n",
        "        unknown = [name for name in lora.loras if name not in self.claims]\n"
        "        if len(unknown) == len(lora.loras) or any(end_of(name) not in offered for name in unknown):\n",
    ),
    "where a good one is in a slot, and not where it is in memory": (
        "8.14",
        "sorted(self.list_adapters() - self.manager.kept)",
        "sorted(self.list_adapters() - self.manager.kept - self.manager.list_active_adapters().keys())",
    ),
    "where slots are pinned, and not where they are in use": (
        "8.20",
        "        self.pinned_adapters.add(lora_id)\n        self.activate_adapter(lora_id)\n",
        "        if lora_id not in self.tiers.slots and len(self.pinned_adapters) >= self.lora_slots:\n"
        "            raise RuntimeError('all slots are pinned')\n"
        "        self.pinned_adapters.add(lora_id)\n        self.activate_adapter(lora_id)\n",
    ),
    "with the table before the copy": (
        "8.21",
        "        self.write_slot(lora, slot)\n        self.tiers.slots.put(lora_id, slot)\n",
        "        self.tiers.slots.put(lora_id, slot)\n        self.write_slot(lora, slot)\n",
    ),
    "of other threads alone": (
        "8.28",
        "        if not self._lock.acquire(blocking=False) and self._caller == threading.get_ident():\n"
        '            raise RuntimeError(IN_THE_MIDDLE.format("engine"))\n',
        "        if not self._lock.acquire(blocking=False):\n"
        "            if self._caller != threading.get_ident():\n                raise EngineBusy('busy')\n",
    ),
    "where some of a module is left alone, and not where all is": (
        "8.30",
        "                if rows:\n",
        "                if tensor is None and part is not None:\n                    table[slot] = 0\n"
        "                if rows:\n",
    ),
}
# And one that was once refused.
TAKEN = {
    "in a sentence of one's own": (
        "8.28",
        "        if not self._lock.acquire(blocking=False) and self._caller == threading.get_ident():\n"
        '            raise RuntimeError(IN_THE_MIDDLE.format("engine"))\n',
        "        if not self._lock.acquire(blocking=False):\n"
        "            raise RuntimeError('it is in another call')\n",
    ),
}


@pytest.mark.nightly
def test_a_fix_is_judged_by_what_the_engine_does():
    """Half a fix is refused, and so is one that breaks something else; the words of an error are the hunter's own."""
    jobs = []
    for name, (number, old, new) in {**REFUSED, **TAKEN}.items():
        hunt = HUNTS[number]
        [(module, text)] = hunt.faults[0].texts().items()
        text = engine_file(module).read_text() if number == "8.21" else text
        assert text.count(old) == 1, name
        jobs.append(hunt_grade.incident_job(hunt, name, {module: Source("fix.py", text.replace(old, new))}))

    assert {job.key for job, outcome in judged(jobs) if outcome.passed} == TAKEN.keys()


@pytest.mark.nightly
def test_a_test_passes_on_a_sound_engine_that_is_written_otherwise(tmp_path):
    """Ours do. One that asserts how the engine is written fails there, which no broken engine shows."""
    inner = {
        "8.8": "def test_hunt_08(world):\n"
        "    import pytest\n"
        "    engine, looked = world.engine(), []\n"
        "    class Claims(dict):\n"
        "        def __getitem__(self, name):\n"
        "            looked.append(name)\n            return dict.__getitem__(self, name)\n"
        "    wrapped = engine.adapters.manager.wrapped\n"
        "    wrapped.claims = Claims(wrapped.claims)\n"
        "    change = lambda found: {name.replace('layers.1.', 'layers.7.'): w for name, w in found.items()}\n"
        "    with pytest.raises(ValueError):\n        engine.add_lora(world.adapter(7, change=change))\n"
        "    assert not looked\n",
        "8.14": "def test_hunt_14(world, monkeypatch):\n"
        "    engine, seen = world.engine(max_loras=1, max_cpu_loras=1), []\n"
        "    world.ask(engine, world.adapter(1))\n"
        "    manager = engine.adapters.manager\n"
        "    add = manager.add_adapter\n"
        "    kept = lambda lora: (seen.append(set(manager.list_adapters())), add(lora))[1]\n"
        "    monkeypatch.setattr(manager, 'add_adapter', kept)\n"
        "    world.ask(engine, world.adapter(2))\n"
        "    assert seen == [{1}]\n",
        "8.18": "def test_hunt_18(world, monkeypatch):\n"
        "    from pathlib import Path\n    import pytest, torch\n"
        "    asked, load = [], torch.load\n"
        "    monkeypatch.setattr(torch, 'load', lambda *a, **k: (asked.append(k), load(*a, **k))[1])\n"
        "    lora = world.adapter(1)\n"
        "    world.engine().add_lora(lora)\n"
        "    weights = Path(lora.lora_path, 'adapter_model.safetensors')\n"
        "    from safetensors.torch import load_file\n"
        "    torch.save(load_file(weights), weights.with_suffix('.bin'))\n"
        "    weights.unlink()\n"
        "    world.engine().add_lora(lora)\n"
        "    assert all(k.get('weights_only') for k in asked)\n",
        "8.21": "def test_hunt_21(world, monkeypatch):\n"
        "    import pytest\n"
        "    tiers, found = (manager := world.engine().adapters.manager).tiers, []\n"
        "    find = tiers.find_slot\n"
        "    monkeypatch.setattr(tiers, 'find_slot', lambda: (found.append(1), find())[1])\n"
        "    with pytest.raises(ValueError):\n        manager.activate_adapter(9)\n"
        "    assert not found\n",
        "8.28": "def test_hunt_28(world, monkeypatch):\n"
        "    from tests.worlds.hunts import in_a_thread, PROMPT, greedy\n"
        "    engine, said = world.engine(), []\n"
        "    launch = engine.runner.launch_model\n"
        "    def launched(step):\n"
        "        said.append(in_a_thread(engine.step))\n        return launch(step)\n"
        "    monkeypatch.setattr(engine.runner, 'launch_model', launched)\n"
        "    engine.add_request('a', PROMPT, greedy(1))\n    engine.step()\n"
        "    assert type(said[0]).__name__ == 'EngineBusy'\n",
    }
    jobs = []
    for number, text in inner.items():
        path = tmp_path / f"test_inner_{number[2:]}.py"
        path.write_text(f'pytest_plugins = "tests.worlds.hunts"\n\n\n{text}')
        otherwise = HUNTS[number].right_forms[0].sources()
        for engine, sources in ((hunt_grade.SOUND, {}), (hunt_grade.OTHERWISE, otherwise)):
            jobs.append(on_engine((number, "ours", engine), reference(HUNTS[number]), sources))
            jobs.append(on_engine((number, "inner", engine), path, sources))

    problems = {job.key: hunt_grade.problem_of(job.key[2], outcome) for job, outcome in judged(jobs)}

    refused = {key for key, problem in problems.items() if problem}
    assert refused == {(number, "inner", hunt_grade.OTHERWISE) for number in inner}
    assert all(hunt_grade.OTHERWISE in problems[key] for key in refused)
    assert {number for number, hunt in HUNTS.items() if hunt.right_forms} == set(inner)


def on_engine(key, path, sources):
    return Job(key, path.stem, sources, stop_at_first=True, files=(path,))


# Each is right but for its last line, which no incident promises.
TOO_STRONG = {
    "8.16": (
        "from tests.worlds.hunts import PROMPT, greedy\n"
        "    engine = world.engine(max_loras=2)\n"
        "    for lora in (world.adapter(1), world.adapter(2), None):\n"
        "        engine.add_request(str(lora and lora.lora_int_id), PROMPT, greedy(4), lora_request=lora)\n"
        "    assert len(engine.step()) == 3\n"
        "    assert engine.get_metrics()['lora']['loads'] == 2\n",
        "it counts reads, and users of both engines get the same answers. It fails on a sound engine which reads an "
        "adapter's files twice when it loads it: ",
    ),
    "8.21": (
        "import pytest\n"
        "    engine = world.engine(max_loras=2)\n"
        "    for adapter_id in (1, 2):\n"
        "        world.ask(engine, world.adapter(adapter_id))\n"
        "    with pytest.raises((ValueError, KeyError, AttributeError)):\n"
        "        engine.adapters.manager.activate_adapter(9)\n"
        "    assert engine.debug_info()['slots'] == [1, 2]\n",
        "it says which slot is whose, and any slot is as good as another. It fails on a sound engine which gives an "
        "adapter the highest free slot, where ours gives the lowest: ",
    ),
}


def test_a_test_that_is_too_strong_is_told_what_it_asks_for_beyond_the_incident(tmp_path):
    files = {number: tmp_path / f"test_strong_{number[2:]}.py" for number in TOO_STRONG}
    for number, (body, _) in TOO_STRONG.items():
        files[number].write_text(
            f'pytest_plugins = "tests.worlds.hunts"\n\n\ndef test_strong(world):\n    {body}'
        )

    said = on_sound_engines(files)

    for number, (_, why) in TOO_STRONG.items():
        [problem] = filter(None, said[number])
        assert problem.startswith(f"test_strong is too strong: {why}")


@pytest.mark.nightly
def test_our_tests_ask_for_no_more_than_all_sound_engines_keep():
    said = on_sound_engines({number: reference(hunt) for number, hunt in HUNTS.items()})

    assert said == {number: [None] * len(hunt.sound_engines) for number, hunt in HUNTS.items()}
    assert [e.name for e in HUNTS["8.15"].sound_engines] == ["from the highest slot down"]
    assert len(HUNTS["8.16"].sound_engines) == 2


def on_sound_engines(files):
    """What is said of tests on each of the engines that are sound and written otherwise.   files: by hunt"""
    jobs = []
    for number, path in files.items():
        for job in hunt_grade.jobs_on_sound_engines(HUNTS[number], path):
            jobs.append(replace(job, key=(number, job.key)))
    said = {number: [] for number in files}
    for job, outcome in judged(jobs):
        number, engine = job.key
        said[number].append(hunt_grade.problem_of(engine, outcome))
    return said


WRONG = {
    "always_passes": ("assert True", "must fail there: it never calls the code that is broken"),
    "asks_for_what_is_right_there": (
        "from minivllm.lora.mapping import compute_runs\n    assert compute_runs([1, 1])",
        "must fail there: it calls the code that is broken, but what it asks for is right there",
    ),
    "always_fails": ("assert False, 'no'", "fails on the sound engine"),
    "fails_on_everything": (
        "import sys\n    assert not [f for f in sys.meta_path if type(f).__name__ == 'Overlay' and f.sources]",
        "fails on another fault",
    ),
    "is_skipped": ("import pytest\n    pytest.skip('not today')", "is skipped on the sound engine"),
    "is_skipped_where_it_would_fail": (
        "import pytest, sys\n    if [f for f in sys.meta_path if type(f).__name__ == 'Overlay' and f.sources]:\n"
        "        pytest.xfail('broken')",
        "is skipped on the broken engine",
    ),
    "never_ends": ("while True:\n        pass", "no end after"),
    "cannot_be_read": ("import nothing_of_this_name", "fails on the sound engine"),
}


@pytest.fixture(scope="module")
def said(checkout):
    """Of wrong tests."""
    paths = []
    for name, (body, _) in WRONG.items():
        paths.append(checkout.root / f"test_{name}.py")
        paths[-1].write_text(f"def test_{name}():\n    {body}\n")
    return dict(zip(WRONG, graded(checkout, "8.17", *paths), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_test_that_is_wrong_is_told_why(said, name):
    assert WRONG[name][1] in " / ".join(said[name])


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import inspect\nassert 'roll' not in inspect.getsource(LoRAKernelMeta)", ".getsource"),
        ("from inspect import getsourcelines as lines", "the import of inspect.getsourcelines"),
        ("import linecache", "the import of linecache"),
        ("import dis", "the import of dis"),
        ("import ast", "the import of ast"),
        ("import importlib.util\nimportlib.util.find_spec('minivllm')", "the import of importlib.util"),
        ("__import__('dis').dis(slot_runs)", "the import of dis"),
        ("assert b'x' in slot_runs.__code__.co_code", ".__code__"),
        ("code = getattr(slot_runs, '__code__')", "'__code__'"),
        ("open(mapping.__file__).read()", ".__file__"),
        ("text = open('minivllm/lora/mapping.py').read()", "the file 'minivllm/lora/mapping.py'"),
        ("import labs.kit.hunt", "the import of labs.kit.hunt"),
        ("from labs.kit.overlay import active", "the import of labs.kit.overlay.active"),
        ("exec('import ' + 'd' + 'is')", "exec"),
    ],
)  # fmt: skip
def test_a_test_that_reads_source_is_refused_with_its_line(tmp_path, code, what):
    path = tmp_path / "test_reading.py"
    path.write_text(f"import pytest\n\n{code}\n")

    [problem], seconds = hunt_grade.grade_test(HUNTS["8.17"], path)

    line = 3 + code.count("\n") * (what != "the import of importlib.util")
    assert problem.startswith(f"test_reading.py:{line}: {what} reads how the engine is written; ")
    assert seconds == 0


@each
def test_no_right_test_reads_source(hunt):
    assert source_reading(hunt.starter) is None
    assert source_reading(reference(hunt).read_text()) is None


def ended(test, outcome="passed", message=""):
    return Outcome([Result(test, outcome, message)])


HUNT_09 = "labs/08_incidents/test_09.py::test_hunt_09"
HANGS = Outcome([], trouble="no end after 60 s of waiting")
SAID = {
    "a variant that was seen": (hunt_grade.VARIANT, ended(HUNT_09, "failed", "no"), None),
    "a variant that was not": (
        *(hunt_grade.VARIANT + HUNTS["8.9"].faults[1].lets, ended(HUNT_09)),
        "your test passes on an engine where modules with an alpha of their own get everybody's alpha, and those with "
        "a rank of their own are right: another form of the same fault, on which it must fail, too",
    ),
    "the learner's test": (
        *(hunt_grade.FIX, ended(HUNT_09, "failed", "no")),
        "test_hunt_09 fails on your fix, and must pass there: no",
    ),
    "one of ours is told as what it promises": (
        *(
            hunt_grade.FIX,
            ended("tests/engine/x.py::test_15_a_reload_happens_once[a]", "failed", "read twice"),
        ),
        "with your fix it does not hold that a reload happens once (test_15_a_reload_happens_once[a]): read twice",
    ),
    "with its class": (
        *(hunt_grade.FIX, ended("tests/x.py::TestASecondThread::test_waits[::a]", "failed", "no")),
        "with your fix it does not hold that a second thread waits (TestASecondThread::test_waits[::a]): no",
    ),
    "a fix that hangs": (
        *(hunt_grade.FIX, HANGS),
        "on your fix: no end after 60 s of waiting; a call hangs, or computes for too long, that ends on the sound "
        "engine",
    ),
    "a test that hangs": (
        *(hunt_grade.SOUND, HANGS),
        "on the sound engine: no end after 60 s of waiting; bound its steps or its seconds",
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_what_came_of_a_test_on_an_engine_is_said(what):
    engine, outcome, said = SAID[what]

    assert hunt_grade.problem_of(engine, outcome) == said


def test_the_seconds_of_a_grade_are_those_that_one_waits(monkeypatch):
    """Many engines are tried, several at a time: what their runs took together is more."""
    clock = iter([100.0, 107.5])
    outcome = Outcome([Result("test_x.py::test_x", "passed")], seconds=7.0)
    monkeypatch.setattr(hunt_grade.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(hunt_grade, "run", lambda jobs, limit: [(job, outcome) for job in jobs])

    problems, seconds = hunt_grade._judge([Job(hunt_grade.SOUND, "8.17", {})] * 4, 15)

    assert (problems, seconds) == ([], 7.5)


@pytest.mark.nightly
def test_a_test_of_kernels_runs_by_hand_as_the_hunt_says(checkout):
    """On a machine without a GPU they need Triton's interpreter, which nobody but `lab` had chosen."""
    path = checkout.root / "labs" / PHASE / "test_by_hand.py"
    path.write_text(
        "from minivllm.gpu.sgmv.lora_shrink_op import shrink\n"
        "import torch\nfrom tests.worlds.hunts import SmallLinear\n\npytest_plugins = 'tests.worlds.hunts'\n\n"
        "def test_rows():\n"
        "    layer = SmallLinear(backend='triton', dtype=torch.float32)\n"
        "    x = torch.ones(3, 16)\n"
        "    torch.testing.assert_close(layer.rows(x, [1, 0, 2]), layer.answer(x, [1, 0, 2]))\n"
    )

    sound = checkout.pytest(str(path.relative_to(checkout.root)))
    broken = checkout.lab("hunt", "17", "--", "pytest", "-p", "no:cacheprovider", str(path))
    path.unlink()

    assert sound.returncode == 0, sound.stdout
    assert broken.returncode == 0, broken.stdout


def test_a_hunt_is_done_with_a_right_test_and_then_a_right_fix(checkout):
    hunt = read_hunts(checkout.root)["8.17"]
    [module] = hunt.broken()
    told = checkout.lab("hunt", "17").stdout
    assert "\n     It holds the answers of what you have not solved: 3.4\n" in told  # of 3.1 no body is in it
    assert "TODO" in checkout.lab("hunt", "17", "--check").stdout

    hunt.test_file.write_text(reference(hunt).read_text())
    first = checkout.lab("check", "8.17")

    assert first.returncode == 1
    assert "Your test is right" in first.stdout
    fix = hunt.fix_file(module)
    given = fix.read_text()
    assert given == hunt.handed_out()[module]
    fix.write_text(hunt.faults[1].sources()[module].text)
    assert "fails on your fix" in checkout.lab("hunt", "17", "--check").stdout
    fix.write_text(given.replace("# endregion", ""))
    lost = checkout.lab("hunt", "17", "--check")
    assert "leave the lines '# region lab ...'" in lost.stdout + lost.stderr
    [edit] = hunt.faults[0].edits
    assert given.count(edit.new) == 1
    fix.write_text(given.replace(edit.new, edit.old))
    last = checkout.lab("hunt", "17", "--check")
    assert last.returncode == 0, last.stdout
    assert "✓ 8.17" in checkout.lab("hunt").stdout


@pytest.mark.nightly
def test_the_commands_that_a_hunt_prints_work_as_printed(tmp_path):
    checkout = Checkout(tmp_path)
    for hunt in of_night(list(read_hunts(checkout.root).values()), 4):
        before = hunt.test_file.read_text()
        hunt.test_file.write_text(reference(hunt).read_text())
        said = checkout.lab("hunt", str(hunt.id)).stdout

        broken, sound = re.findall(
            r"^ {5}(\S.*?)   runs it on the (?:broken engine|sound one)$", said, re.MULTILINE
        )

        assert checkout.shell(broken).returncode == 1, hunt.number
        assert checkout.shell(sound).returncode == 0, hunt.number
        hunt.test_file.write_text(before)


def test_what_an_engine_has_done_is_shown_on_lines_that_a_screen_has(tmp_path, capsys):
    world = HuntWorld(tmp_path)
    engine = world.engine()
    world.ask(engine, world.adapter(1))

    world.show(engine)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "{'slots': [1, None],"
    assert any("'loads': 1," in line for line in lines)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


def test_code_of_solved_exercises_is_shown_so_that_what_is_missing_does_not_tell_the_place(checkout):
    """Whatever was solved when a copy was written, it is known whether somebody has changed it."""
    hunt = read_hunts(checkout.root)["8.14"]
    [module] = hunt.broken()

    for solved in ((), {"5.8"}):
        given = hunt.handed_out(solved)[module]
        assert ("# lab 5.8: our code runs here" in given) is (not solved)
        [path] = hunt.hand_out(solved)
        assert hunt.is_as_handed_out()
        path.write_text(given.replace("_load(", "_read("))
        assert not hunt.is_as_handed_out()
        path.unlink()
    assert "our code runs here" not in given
    assert without_docstrings(given) == without_docstrings(hunt.faults[0].texts()[module])


def test_reset_puts_the_starter_back_and_keeps_what_was_there(checkout):
    hunt = read_hunts(checkout.root)["8.3"]
    hunt.test_file.write_text("mine\n")
    hunt.hand_out()

    said = checkout.lab("reset", "8.3", "--yes").stdout

    assert hunt.test_file.read_text() == hunt.starter
    assert hunt.fixes() == {}
    assert said.count("kept: ") == 2
