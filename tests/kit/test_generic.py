"""Checks that every exercise has: wrong answers that they refuse, and right ones that they do not."""

import ast
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from checkout import asked_for, judged

from labs.kit.forks import GENERIC, Job
from labs.kit.generic.snapshots import TooLarge, changes, snapshot
from labs.kit.generic.table import read
from labs.kit.overlay import Source
from labs.kit.regions import edit, functions_in, read_engine
from tests.tools.nights import by_day

SHARED, FAULTS, MEMORY = (
    "test_arguments_stay_as_they_were_and_nobody_else_holds_them",
    "test_an_error_on_the_way_comes_out_and_leaves_nothing_behind",
    "test_a_second_call_gives_what_a_first_one_would",
)
# Exercise and what is wrong: the check that sees it, what that says, and edits of our code.
WRONG = {
    "1.6 the caller's dict is emptied": (
        SHARED,
        "pair_up changed its argument tensors: dict of 6 -> {}; make a copy",
        "for name, tensor in tensors.items():",
        "for name in [*tensors]:\n        tensor = tensors.pop(name)",
    ),
    "2.1 slots in the same memory": (
        SHARED,
        "empty: elements of the result.a[0] lie in the same memory, as `expand` makes them; make room for each",
        "torch.zeros(slots, experts, rank, width, dtype=dtype, device=device)",
        "torch.zeros(1, experts, rank, width, dtype=dtype, device=device).expand(slots, -1, -1, -1)",
    ),
    "2.1 one list of ranks": (
        SHARED,
        "empty: the result.live_ranks[1] and the result.live_ranks[0] are one list",
        *("[[0] * len(buffer) for buffer in self.a]", "[[0] * len(self.a[0])] * len(self.a)"),
    ),
    "3.1 the table is changed": (
        SHARED,
        "slots_of changed its argument lora_index_to_id[0]: 3 -> 7; make a copy",
        *("slot_of_id[0] = -1\n", "slot_of_id[0] = -1\n    lora_index_to_id.reverse()\n"),
    ),
    "3.4 the rows are cleared": (
        SHARED,
        "compute_runs changed its argument token_slots: [-1] -> []; make a copy",
        *("    return runs\n", "    token_slots.clear()\n    return runs\n"),
    ),
    "6.1 the caller's set is kept": (
        SHARED,
        "begin_step: self.pinned is no copy of pinned, but the same set",
        *("self.pinned = set(pinned)", "self.pinned = pinned if isinstance(pinned, set) else set(pinned)"),
    ),
    "7.5 the record itself is changed": (
        SHARED,
        "_with_reload changed its argument adapter.reloads: {} -> {1: LoRARequest}; make a copy",
        "return replace(adapter, generation=generation, reloads={**adapter.reloads, generation: reload})",
        "adapter.reloads[generation] = reload\n        return replace(adapter, generation=generation)",
    ),
    "11.4 a request's own list": (
        SHARED,
        "write: the result.new_blocks[0] is no copy of output.running[0].block_ids, but the same list",
        *("new_blocks.append(blocks[held:])", "new_blocks.append(blocks[held:] if held else blocks)"),
    ),
    "2.7 a slot that is half written": (
        FAULTS,
        "write: an error in ",
        "for module in self.modules.values():\n                module.clear(slot)\n            raise",
        "raise",
    ),
    "5.2 the table first": (
        FAULTS,
        "activate_adapter: an error in write_slot leaves a change behind, self.tiers.slots: {} -> {4: 0}; "
        "so the result is False when it is called again, and not True",
        "self.write_slot(lora, slot)\n        self.tiers.slots.put(lora_id, slot)\n",
        "self.tiers.slots.put(lora_id, slot)\n        self.write_slot(lora, slot)\n",
    ),
    "5.5 the pin first": (
        FAULTS,
        "pin_adapter: an error in activate_adapter leaves a change behind, self.tiers.pinned: set() -> {9}",
        "self.activate_adapter(lora_id)\n        self.pinned_adapters.add(lora_id)\n",
        "self.pinned_adapters.add(lora_id)\n        self.activate_adapter(lora_id)\n",
    ),
    "5.8 a failure that nobody hears of": (
        FAULTS,
        "add_adapter: an error in activate_adapter does not come out, add_adapter returns True",
        "    manager.activate_adapter(adapter_id)\n",
        "    with __import__('contextlib').suppress(RuntimeError):\n"
        "                    manager.activate_adapter(adapter_id)\n",
    ),
    "7.5 forgotten first": (
        FAULTS,
        "settle: an error in remove_adapter leaves a change behind, self.adapters: {1: Adapter} -> {}; so ",
        "self.worker.remove_adapter(adapter.id)\n                self._forget(adapter)\n",
        "self._forget(adapter)\n                self.worker.remove_adapter(adapter.id)\n",
    ),
    "9.4 served first": (
        FAULTS,
        "load: an error in add_lora leaves a change behind, self.served: {} -> {'nowhere': LoRARequest}; so ",
        "await self.llm.add_lora(adapter)\n            self._serve(replace(adapter, load_inplace=False))",
        "self._serve(replace(adapter, load_inplace=False))\n            await self.llm.add_lora(adapter)",
    ),
    "3.1 remembered by id": (
        MEMORY,
        "slots_of: the result is [",
        "slot_of_id = {",
        "memo = globals().setdefault('memo', {})\n"
        "    key = id(ids), id(lora_index_to_id)\n"
        "    if key in memo:\n        return memo[key]\n"
        "    memo[key] = found = []\n"
        "    slot_of_id = {",
        "return [slot_of_id[adapter] for adapter in ids]",
        "found += [slot_of_id[adapter] for adapter in ids]\n    return found",
    ),
    "3.4 a list for all calls": (
        MEMORY,
        "compute_runs: the result is [",
        *("runs: list[tuple[int, slice]] = []", "runs = globals().setdefault('found', [])"),
    ),
    "3.5 remembered by where the memory is": (
        MEMORY,
        "products: the result[0][1] is ",
        "found, rows_of = [], dict[int, list[int]]()",
        "memo = globals().setdefault('memo', {})\n"
        "    weights = memo.setdefault((weights.data_ptr(), weights.shape), weights.clone())\n"
        "    found, rows_of = [], {}",
    ),
}
# What is unusual and right; where an exercise's own tests ask for more than that, they may refuse it.
RIGHT = {
    "3.1 remembered by what it is": (
        "slot_of_id = {",
        "memo = globals().setdefault('memo', {})\n"
        "    key = ids, tuple(lora_index_to_id)\n"
        "    if key in memo:\n        return list(memo[key])\n"
        "    slot_of_id = {",
        "return [slot_of_id[adapter] for adapter in ids]",
        "memo[key] = tuple(slot_of_id[adapter] for adapter in ids)\n    return list(memo[key])",
    ),
    "3.4 a helper that fills what it is given": (
        "    return runs\n",
        "    rows = []\n    _fill(rows, runs)\n    return rows\n\n\n"
        "def _fill(rows, runs):\n    rows.extend(runs)\n",
    ),
    "5.2 the table first, and put back": (
        "self.write_slot(lora, slot)\n        self.tiers.slots.put(lora_id, slot)\n",
        "self.tiers.slots.put(lora_id, slot)\n"
        "        try:\n            self.write_slot(lora, slot)\n"
        "        except Exception as error:\n            self.tiers.slots.pop(lora_id)\n"
        "            raise RuntimeError('no copy') from error\n",
    ),
    "5.8 seconds of its own": (
        "        return True\n",
        "        import time\n\n        return time.perf_counter() > 0\n",
    ),
    "9.1 an error by another name": (
        "except BaseException as error:\n        future.set_exception(error if",
        "except BaseException as raised:\n        error = raised\n        future.set_exception(error if",
    ),
    "11.1 a copy of all": ("return lora_a\n", "return lora_a.clone()\n"),
    "11.3 a view of all rows": (
        "own = by_token[self.part(share)]\n",
        "own = by_token[self.part(share)]\n        if len(own) == share:\n            return own\n",
    ),
}
PRINTS = "    return runs\n", "    print('here')\n    return runs\n"


@pytest.fixture(scope="module")
def said(request):
    """Answer -> its outcome."""
    answers = {name: texts for name, (_, _, *texts) in WRONG.items()} | RIGHT
    answers = {name: answers[name] for name in answers.keys() & asked_for(request)} | {"3.4 prints": PRINTS}
    jobs = []
    for name, texts in answers.items():
        exercise = read_engine()[name.split()[0]]
        source = Source(f"{name}.py", edit(exercise, list(zip(texts[::2], texts[1::2]))))
        jobs.append(Job(name, exercise.number, {exercise.module: source}))
    return {job.key: outcome for job, outcome in judged(jobs)}


# By day one for each of the three checks.
@pytest.mark.parametrize("name", by_day(WRONG, one_in=8))
def test_a_wrong_answer_is_seen_by_a_check_that_knows_nothing_of_the_exercise(said, name):
    check, message, *_ = WRONG[name]

    assert said[name].trouble is None
    [found] = [result for result in said[name].of("failed") if result.test == f"{GENERIC}::{check}"]
    assert found.message.startswith(message)
    assert found.place.startswith(f"{name}.py:")
    assert found.asked.startswith("tests/phase_")


@pytest.mark.parametrize("name", by_day(RIGHT, one_in=4))
def test_a_right_answer_is_not(said, name):
    assert said[name].trouble is None
    assert not [r.message for r in said[name].of("failed", "todo") if r.test.startswith(GENERIC)]


def test_what_code_prints_is_shown_once_however_often_it_is_called_by_checks(said):
    calls_once = [r.printed for r in said["3.4 prints"].results if "::test_runs_are_neighbours" in r.test]

    assert set(calls_once) == {"here\n"}


def test_the_table_names_functions_of_exercises_and_their_parameters():
    exercises = read_engine()
    for section, lines in read().items():
        for number, function, *more in lines:
            exercise = exercises[number]
            tree = ast.parse(exercise.text)
            found = [
                f for region in exercise.regions for f in functions_in(tree, region) if f.name == function
            ]
            assert found, f"lab {number} has no {function}"
            parameters = {a.arg for f in found for a in (*f.args.args, *f.args.kwonlyargs)}
            if section == "arguments":
                assert set(more) <= parameters, f"{function} has no {more}"


@dataclass
class Point:
    at: list


class Plain:
    """Of a module of tests, so that snapshots look into it."""

    def __init__(self, **values):
        self.__dict__.update(values)


def filled(value):
    value[1] = 7
    return value


@pytest.mark.parametrize(
    ("made", "change", "said"),
    [
        (lambda: [2, 2], list.clear, "it: [2, 2] -> []"),
        (lambda: [2, 2], lambda v: v.__setitem__(1, -1), "it[1]: 2 -> -1"),
        (lambda: {"a": [1]}, lambda v: v["a"].append(2), "it['a']: [1] -> [1, 2]"),
        (lambda: {3, 1}, lambda v: v.remove(3), "it: {1, 3} -> {1}"),
        (lambda: Point([1]), lambda v: v.at.pop(), "it.at: [1] -> []"),
        (lambda: torch.zeros(2), filled, "it: float32 (2,) [0., 0.] -> float32 (2,) [0., 7.]"),
        (
            lambda: torch.zeros(9, dtype=torch.bfloat16),
            filled,
            "it (bfloat16 (9,)) has other numbers than before",
        ),
        (lambda: torch.zeros(4)[::2], filled, "it: float32 (2,) [0., 0.] -> float32 (2,) [0., 7.]"),
        (
            lambda: OrderedDict(a=1, b=2),
            lambda v: v.move_to_end("a"),
            "it in the order of[0]: \"'a'\" -> \"'b'\"",
        ),
        (lambda: Plain(x=Plain(y=[])), lambda v: v.x.y.append(1), "it.x.y: [] -> [1]"),
        (lambda: Plain(x=1), lambda v: setattr(v, "z", v), "it.z: nothing -> the same as it"),
    ],
)
def test_a_snapshot_tells_what_has_changed(made, change, said):
    value = made()
    before = snapshot({"it": value}, deep=True)

    change(value)

    assert str(changes(before, snapshot({"it": value}, deep=True))[0]) == said


@pytest.mark.parametrize(
    "value", [torch.tensor([float("nan")]), {2: Point([1]), 1: "b"}, (x for x in "ab"), {None, 1}]
)
def test_a_snapshot_of_what_has_not_changed_is_the_same(value):
    before = snapshot({"it": value}, deep=True)

    assert changes(before, snapshot({"it": value}, deep=True)) == []


def test_a_snapshot_of_data_looks_into_no_object():
    value = Plain(x=[])
    before = snapshot({"it": [value]}, deep=False)

    value.x.append(1)

    assert changes(before, snapshot({"it": [value]}, deep=False)) == []
    assert changes(before, snapshot({"it": [Plain(x=[])]}, deep=False))


def test_a_snapshot_does_not_go_on_for_ever():
    with pytest.raises(TooLarge):
        snapshot({"it": list(range(100_000))}, deep=False)
