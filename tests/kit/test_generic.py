"""Checks that every exercise has: wrong answers that they refuse, whatever an exercise's own tests say."""

import json
import subprocess
import sys

import pytest

from labs.kit.forks import GENERIC
from labs.kit.regions import edit, read_engine
from minivllm.labs import ROOT

SHARED, FAULTS, MEMORY = (
    "test_arguments_stay_as_they_were_and_nobody_else_holds_them",
    "test_an_error_on_the_way_comes_out_and_leaves_nothing_behind",
    "test_a_second_call_gives_what_a_first_one_would",
)
# Exercise and what is wrong; edits of our code; the check that sees it, and what that says.
WRONG = {
    "1.6 the caller's dict is emptied": (
        (
            "for name, tensor in tensors.items():",
            "for name in [*tensors]:\n        tensor = tensors.pop(name)",
        ),
        SHARED,
        "pair_up changed its argument tensors: dict of 6 -> {}; make a copy",
    ),
    "2.1 slots in the same memory": (
        (
            "torch.zeros(slots, experts, rank, width, dtype=dtype, device=device)",
            "torch.zeros(1, experts, rank, width, dtype=dtype, device=device).expand(slots, -1, -1, -1)",
        ),
        SHARED,
        "empty: elements of the result.a[0] lie in the same memory, as `expand` makes them; make room for each",
    ),
    "2.1 one list of ranks": (
        ("[[0] * len(buffer) for buffer in self.a]", "[[0] * len(self.a[0])] * len(self.a)"),
        SHARED,
        "empty: the result.live_ranks[1] and the result.live_ranks[0] are one list",
    ),
    "3.1 the table is changed": (
        ("slot_of_id[0] = -1\n", "slot_of_id[0] = -1\n    lora_index_to_id.reverse()\n"),
        SHARED,
        "slots_of changed its argument lora_index_to_id[0]: 3 -> 7; make a copy",
    ),
    "3.4 the rows are cleared": (
        ("    return runs\n", "    token_slots.clear()\n    return runs\n"),
        SHARED,
        "compute_runs changed its argument token_slots: [-1] -> []; make a copy",
    ),
    "6.1 the caller's set is kept": (
        ("self.pinned = set(pinned)", "self.pinned = pinned if isinstance(pinned, set) else set(pinned)"),
        SHARED,
        "begin_step: self.pinned is no copy of pinned, but the same set",
    ),
    "7.5 the record itself is changed": (
        (
            "return replace(adapter, generation=generation, reloads={**adapter.reloads, generation: order})",
            "adapter.reloads[generation] = order\n        return replace(adapter, generation=generation)",
        ),
        SHARED,
        "_with_reload changed its argument adapter.reloads: {} -> {1: LoRARequest}; make a copy",
    ),
    "11.4 a request's own list": (
        ("new_blocks.append(blocks[held:])", "new_blocks.append(blocks[held:] if held else blocks)"),
        SHARED,
        "write: the result.new_blocks[0] is no copy of output.running[0].block_ids, but the same list",
    ),
    "2.7 a slot that is half written": (
        (
            "for module in self.modules.values():\n                module.clear(slot)\n            raise",
            "raise",
        ),
        FAULTS,
        "write: an error in ",
    ),
    "5.2 the table first": (
        (
            "self._write(lora, slot)\n        self._active_adapters.put(lora_id, slot)\n",
            "self._active_adapters.put(lora_id, slot)\n        self._write(lora, slot)\n",
        ),
        FAULTS,
        "activate_adapter: an error in _write leaves a change behind, self._active_adapters: {} -> {4: 0}; "
        "so the result is False when it is called again, and not True",
    ),
    "5.5 the pin first": (
        (
            "self.activate_adapter(lora_id)\n        self.pinned_adapters.add(lora_id)\n",
            "self.pinned_adapters.add(lora_id)\n        self.activate_adapter(lora_id)\n",
        ),
        FAULTS,
        "pin_adapter: an error in activate_adapter leaves a change behind, self.pinned_adapters: set() -> {9}",
    ),
    "5.8 a failure that nobody hears of": (
        (
            "    manager.activate_adapter(adapter_id)\n",
            "    with __import__('contextlib').suppress(RuntimeError):\n"
            "                manager.activate_adapter(adapter_id)\n",
        ),
        FAULTS,
        "add_adapter: an error in activate_adapter does not come out, add_adapter returns True",
    ),
    "7.5 forgotten first": (
        (
            "self.worker.remove_adapter(adapter.id)\n                self._forget(adapter)\n",
            "self._forget(adapter)\n                self.worker.remove_adapter(adapter.id)\n",
        ),
        FAULTS,
        "settle: an error in remove_adapter leaves a change behind, self.adapters: {1: Adapter} -> {}; so ",
    ),
    "9.4 served first": (
        (
            "await self.llm.add_lora(adapter)\n            self._serve(replace(adapter, load_inplace=False))",
            "self._serve(replace(adapter, load_inplace=False))\n            await self.llm.add_lora(adapter)",
        ),
        FAULTS,
        "load: an error in add_lora leaves a change behind, self.served: {} -> {'nowhere': LoRARequest}; so ",
    ),
    "3.1 remembered by id": (
        (
            "slot_of_id = {",
            "memo = globals().setdefault('memo', {})\n"
            "    key = id(ids), id(lora_index_to_id)\n"
            "    if key in memo:\n        return memo[key]\n"
            "    memo[key] = found = []\n"
            "    slot_of_id = {",
            "return [slot_of_id[adapter] for adapter in ids]",
            "found += [slot_of_id[adapter] for adapter in ids]\n    return found",
        ),
        MEMORY,
        "slots_of: the result is [",
    ),
    "3.4 a list for all calls": (
        ("runs: list[tuple[int, slice]] = []", "runs = globals().setdefault('found', [])"),
        MEMORY,
        "compute_runs: the result is [",
    ),
    "3.5 remembered by where the memory is": (
        (
            "lora_a = matrices(lora_a)",
            "memo = globals().setdefault('memo', {})\n"
            "    lora_a = memo.setdefault((lora_a.data_ptr(), lora_a.shape), matrices(lora_a).clone())",
        ),
        MEMORY,
        "shrink_runs: output is float",
    ),
}
RUN = """
import json, sys
from labs.kit.forks import Job, run
from minivllm.labs import Source

jobs = [Job(name, name.split()[0], {module: Source(f"{name}.py", text)})
        for name, (module, text) in json.load(sys.stdin).items()]
for job, outcome in run(jobs):
    failed = {r.test: [r.message, r.place, r.asked] for r in outcome.of("failed")}
    print(json.dumps([job.key, failed, outcome.trouble]), flush=True)
"""


def judge(texts):
    """Name -> tests that failed, with message and places; and what kept the tests from their end."""
    process = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(texts), capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    return {name: (failed, trouble) for name, failed, trouble in map(json.loads, process.stdout.splitlines())}


@pytest.fixture(scope="module")
def judged():
    exercises = {name: read_engine()[name.split()[0]] for name in WRONG}
    return judge({name: (e.module, edit(e, batched(WRONG[name][0]))) for name, e in exercises.items()})


def batched(texts):
    """Old and new in turn, as pairs."""
    return list(zip(texts[::2], texts[1::2]))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_seen_by_a_check_that_knows_nothing_of_the_exercise(judged, name):
    _, check, said = WRONG[name]
    failed, trouble = judged[name]

    assert trouble is None
    assert f"{GENERIC}::{check}" in failed, failed
    message, place, asked = failed[f"{GENERIC}::{check}"]
    assert message.startswith(said)
    assert place.startswith(f"{name}.py:")
    assert asked.startswith("tests/phase_")
