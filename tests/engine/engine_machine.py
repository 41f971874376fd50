"""Random sequences of everything an engine can be asked for; each answer is held to an engine that serves it alone.

    python tests/engine/engine_machine.py --operations 100000 --seed 0

`EngineMachine` is a state machine of hypothesis, with one rule for each operation: requests, steps, reloads, pins,
unloads, aborts, errors thrown into the engine. Beside the engine it keeps a model of what was asked for: which requests
are unfinished, and which version of its adapter each of them belongs to. From it follow two kinds of checks.

- Answers. A request belongs to the version of its adapter that was current when it was added. Versions are folders that
  never change, so an engine that serves the request alone must give the same tokens, texts and logprobs. Everything is
  float64: what else is in a batch moves logits by about 1e-15, which decides no token. That an engine with a single
  request is right is not checked here, because other tests hold it to transformers and PEFT.
- State. After each operation blocks, queues, slots, memory and records must agree with each other and with the model.
  A call is refused if, and only if, the model says why. A step that has work to do does some of it.

Hypothesis shrinks a failure to few operations and prints them, and a line `@reproduce_failure(version, blob)`. The same
sequence runs again with `--blob`, followed by what stands between the quotes.
"""

import argparse
import itertools
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hypothesis
import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_as_test
from machine_world import (
    BAD,
    BAD_AT_FIRST_SIGHT,
    GOOD,
    NUM_ADAPTERS,
    VOCABULARY,
    Ask,
    Faults,
    asks,
    check_completion,
    check_logprobs,
    disk,
    engine_options,
    version_of,
    was_thrown,
)

from minivllm import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from minivllm.engine.parallel_sampling import child_id
from tests.oracles.invariants import check_blocks, check_engine, check_slot_contents, check_slots
from tests.worlds.ahead import run_ahead
from tests.worlds.engines import snapshot

MOST_REQUESTS = 12  # unfinished at a time
# An engine hangs that, in a row, takes so many steps which compute nothing and end nobody ...
MOST_IDLE_STEPS = 1
# ... or that, when nothing comes any more, takes longer than this for all prompts and answers. It is many times what
# even engines need that preempt all the time.
MOST_STEPS_A_TOKEN = 2

ADAPTERS = st.integers(1, NUM_ADAPTERS)
VERSIONS = st.sampled_from([*GOOD, *GOOD, *GOOD, *BAD])
SHARED = "shared"  # a name that any adapter may have, one at a time
NAMES = [*(f"a{adapter_id}" for adapter_id in range(1, NUM_ADAPTERS + 1)), SHARED]
# How an adapter is named: by its own name or the shared one, its folder directly or through a link, which is turned to
# another version the next time.
WAYS = st.sampled_from(["", "", "shared", "link"])


@dataclass
class Live:
    """A request that the engine took and that has not ended.

    version   of its adapter, current when it was added
    added     the number of the call that added it
    tokens    of each answer, as they came; `texts` likewise
    ended     number of an answer -> why it ended
    errors    those that its answers ended with
    """

    ask: Ask
    adapter_id: int
    version: str
    added: int
    tokens: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    ended: dict[int, str] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.ask.n)]
        self.texts = [""] * self.ask.n


@dataclass
class Order:
    """To load an adapter, or to load it again.

    names   by which requests may name it from then on
    call    the number of the call that ordered it
    """

    version: str
    names: set[str]
    call: int


@dataclass
class Record:
    """An adapter that the engine knows.

    orders     the last one says what new requests get; a reload that fails takes its order back
    was_read   whether it was ever seen in memory
    leaving    whether its unload waits for requests
    """

    orders: list[Order]
    was_read: bool = False
    leaving: bool = False

    @property
    def version(self) -> str:
        return self.orders[-1].version

    @property
    def names(self) -> set[str]:
        return self.orders[-1].names


class EngineMachine(RuleBasedStateMachine):
    """One engine from its first request until everything has left it.

    counts    what happened, in all machines together
    live      unfinished requests by id
    records   adapters that the engine knows, by id
    pinned    adapters that were pinned before the last step
    idle      how many steps in a row had work to do and did none
    """

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.outer_error = sys.exc_info()[1]

    @initialize(options=engine_options(), ahead=st.booleans())
    def start(self, options: dict[str, Any], ahead: bool) -> None:
        """ahead   a step is launched before the tokens of the one before are read (async scheduling)"""
        self.options, self.ahead = options, ahead
        self.engine: LLMEngine = disk().engine(disk().tokenizer, **options)
        if ahead:
            self.engine = run_ahead(self.engine)
        self.patches = ExitStack()
        self.links = Path(self.patches.enter_context(tempfile.TemporaryDirectory()))
        self.faults = Faults(self.engine, self.patches)
        self.live: dict[str, Live] = {}
        self.records: dict[int, Record] = {}
        self.pinned: set[int] = set()
        self.idle = 0
        self.counts["engines"] += 1

    # ---- operations: requests ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MOST_REQUESTS)
    @rule(adapter_id=st.integers(0, NUM_ADAPTERS), ask=asks(), way=WAYS)
    def request(self, adapter_id: int, ask: Ask, way: str) -> None:
        """Of the base model, or of an adapter in its current version."""
        self.send(ask, self.lora(adapter_id, way=way) if adapter_id else None)

    @precondition(lambda self: len(self.live) < MOST_REQUESTS)
    @rule(name=st.sampled_from(NAMES), ask=asks())
    def request_by_name(self, name: str, ask: Ask) -> None:
        owner = self.owner_of(name)
        if owner:
            self.send(ask, self.lora(owner, way=SHARED if name == SHARED else ""), by_name=True)
        else:
            self.refused(self.engine.add_request, "x", ask.prompt, ask.params, lora_request=name)

    @precondition(lambda self: len(self.live) < MOST_REQUESTS)
    @rule(adapter_id=ADAPTERS, ask=asks(), version=VERSIONS, way=WAYS)
    def request_with_reload(self, adapter_id: int, ask: Ask, version: str, way: str) -> None:
        """`load_inplace` with a request: those that come later belong to this version as well."""
        self.send(ask, self.lora(adapter_id, version, load_inplace=True, way=way))

    @precondition(lambda self: len(self.live) < MOST_REQUESTS)
    @rule(adapter_id=ADAPTERS, ask=asks(), version=VERSIONS)
    def request_of_a_version(self, adapter_id: int, ask: Ask, version: str) -> None:
        """Without a reload: refused where the adapter is known with another version."""
        self.send(ask, self.lora(adapter_id, version))

    @rule(kind=st.integers(0, 5), ask=asks())
    def request_nonsense(self, kind: int, ask: Ask) -> None:
        """What can never be served changes nothing."""
        taken = next(iter(self.live), "x")
        request_id, prompt, params, lora_request = [
            ("x", [], ask.params, None),
            ("x", [5] * 128, ask.params, None),
            ("x", [VOCABULARY], ask.params, None),
            ("x", [5], SamplingParams(stop_token_ids=[VOCABULARY]), None),
            ("x", [5], ask.params, "nobody"),
            (taken, [5] * 128 if taken == "x" else [5], ask.params, None),
        ][kind]
        self.refused(self.engine.add_request, request_id, prompt, params, lora_request=lora_request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, MOST_REQUESTS - 1), several=st.booleans())
    def abort(self, which: int, several: bool) -> None:
        """One request, or two and an id that nobody has."""
        ids = dict.fromkeys(list(self.live)[(which + k) % len(self.live)] for k in range(1 + several))
        self.call(self.engine.abort_request, [*ids, "nobody"] if several else next(iter(ids)))
        for request_id in ids:
            del self.live[request_id]
        self.counts["aborts"] += len(ids)

    # ---- operations: steps ------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule()
    def step(self) -> None:
        self.take_step()

    @precondition(lambda self: self.live)
    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take_step()

    @rule(
        point=st.sampled_from(Faults.POINTS),
        error=st.sampled_from([RuntimeError, MemoryError]),
        skip=st.integers(0, 3),
        times=st.integers(1, 2),
    )
    def arm_fault(self, point: str, error: type[Exception], skip: int, times: int) -> None:
        self.faults.arm(point, error, skip, times)

    # ---- operations: adapters ---------------------------------------------------------------------------------

    @rule(adapter_id=ADAPTERS, version=VERSIONS, load_inplace=st.booleans(), way=WAYS)
    def add_lora(self, adapter_id: int, version: str, load_inplace: bool, way: str) -> None:
        """Load ahead of requests, or reload."""
        self.load(self.lora(adapter_id, version, load_inplace, way))

    @rule(adapter_id=ADAPTERS)
    def reload_in_place(self, adapter_id: int) -> None:
        """From the folder that the adapter has."""
        self.load(self.lora(adapter_id, load_inplace=True))

    @rule(adapter_id=ADAPTERS)
    def remove_lora(self, adapter_id: int) -> None:
        was_known = self.call(self.engine.remove_lora, adapter_id)
        assert was_known == (adapter_id in self.records)
        if was_known:
            self.records[adapter_id].leaving = True
        self.counts["unloads"] += was_known

    @rule(adapter_id=ADAPTERS)
    def pin_lora(self, adapter_id: int) -> None:
        pins, record = self.pins(), self.records.get(adapter_id)
        has_slot = len(pins | {adapter_id}) <= self.options["max_loras"]
        versions = {record.version if record else "", *(live.version for live in self.users(adapter_id))}
        is_bad = versions & set(BAD) and adapter_id not in self.engine.list_loras()
        try:
            self.call(self.engine.pin_lora, adapter_id)
        except Exception as error:
            assert self.faults.raised_now(error) or not record or not has_slot or is_bad, error
            assert self.pins() == pins
        else:
            assert record and has_slot and self.pins() == pins | {adapter_id}
            self.counts["pins"] += 1

    @rule(adapter_id=ADAPTERS)
    def unpin_lora(self, adapter_id: int) -> None:
        pins = self.pins()
        assert self.call(self.engine.unpin_lora, adapter_id) == (adapter_id in pins)
        assert self.pins() == pins - {adapter_id}

    # ---- calls, and the model of them -------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call of the engine."""
        self.counts["calls"] += 1
        with self.faults.call():
            return function(*args, **options)

    def pins(self) -> set[int]:
        return set(self.engine.debug_info()["pinned"])

    def users(self, adapter_id: int) -> list[Live]:
        return [live for live in self.live.values() if live.adapter_id == adapter_id]

    def owner_of(self, name: str) -> int | None:
        return next((adapter_id for adapter_id, record in self.records.items() if name in record.names), None)

    def lora(
        self, adapter_id: int, version: str = "", load_inplace: bool = False, way: str = ""
    ) -> LoRARequest:
        """A version of an adapter; "" is the current one."""
        record = self.records.get(adapter_id)
        path = disk().path(adapter_id, version or (record.version if record else GOOD[0]))
        if way == "link" and path.exists():
            link = self.links / str(adapter_id)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            path = link
        name = SHARED if way == "shared" else NAMES[adapter_id - 1]
        return LoRARequest(name, adapter_id, str(path), load_inplace=load_inplace)

    def send(self, ask: Ask, lora: LoRARequest | None, by_name: bool = False) -> None:
        """Add a request. The model says whether the engine must take it, and which version it belongs to."""
        request_id = next(f"r{k}" for k in range(MOST_REQUESTS) if f"r{k}" not in self.live)
        add = self.engine.add_request, request_id, ask.prompt, ask.params
        lora_request = lora.lora_name if lora and by_name else lora
        if lora and (self.reason_to_refuse(lora) or self.all_slots_are_pinned(lora.lora_int_id)):
            self.refused(*add, lora_request=lora_request)
            return
        try:
            self.call(*add, lora_request=lora_request)
        except Exception as error:
            assert self.faults.raised_now(error), f"refused without a reason: {error}"
            return
        version = self.register(lora) if lora else ""
        self.live[request_id] = Live(ask, lora.lora_int_id if lora else 0, version, self.faults.calls)
        self.counts["requests"] += 1

    def load(self, lora: LoRARequest) -> None:
        """`add_lora`, which says whether the adapter is in memory, or waits for requests to be reloaded."""
        adapter_id, version = lora.lora_int_id, version_of(lora)
        if self.reason_to_refuse(lora):
            self.refused(self.engine.add_lora, lora)
            return
        users, is_full = self.users(adapter_id), self.is_memory_full_for(adapter_id)
        try:
            is_loaded = self.call(self.engine.add_lora, lora)
        except Exception as error:
            assert self.faults.raised_now(error) or is_full or version == "nan", error
            return
        if lora.load_inplace:
            # One step ahead, a request may have ended before its last output is given.
            assert is_loaded != bool(users) or self.ahead, (
                "a reload waits if, and only if, there are requests"
            )
        assert users or is_loaded, "it waits for nobody"
        assert not is_loaded or version != "nan", "a bad adapter was loaded"
        self.register(lora)
        self.counts["loads"] += is_loaded

    def refused(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """A call that must be refused, and leaves the engine as it was."""
        before = snapshot(self.engine)
        try:
            self.call(function, *args, **options)
        except (ValueError, FileNotFoundError):
            self.counts["refused"] += 1
        else:
            raise AssertionError(f"not refused: {args} {options}")
        assert snapshot(self.engine) == before, "a refused call has changed something"

    def reason_to_refuse(self, lora: LoRARequest) -> str:
        """Why the engine must not take a request of this adapter, or load it; "" if it must."""
        record, version = self.records.get(lora.lora_int_id), version_of(lora)
        if self.owner_of(lora.lora_name) not in (None, lora.lora_int_id):
            return "another adapter has the name"
        if record and record.leaving:
            return "it is being unloaded"
        if record and not lora.load_inplace and version != record.version:
            return "the id belongs to another folder"
        if (record is None or lora.load_inplace) and version in BAD_AT_FIRST_SIGHT:
            return "the folder is bad"
        return ""

    def all_slots_are_pinned(self, adapter_id: int) -> bool:
        """For other adapters than this one."""
        return len(self.pins() - {adapter_id}) >= self.options["max_loras"]

    def is_memory_full_for(self, adapter_id: int) -> bool:
        """Whether an adapter would have to leave memory that is pinned or in use."""
        memory = self.engine.list_loras()
        kept = self.pins() | {request.adapter_id for request in self.engine.scheduler.running}
        return adapter_id not in memory and len(memory) == self.options["max_cpu_loras"] and memory <= kept

    def register(self, lora: LoRARequest) -> str:
        """Note what a call that was taken says of an adapter; the version that it belongs to."""
        record = self.records.get(lora.lora_int_id)
        if record is None:
            record = self.records[lora.lora_int_id] = Record(
                [Order(version_of(lora), set(), self.faults.calls)]
            )
        elif lora.load_inplace:
            # Names lead to a folder. Those of another folder are free, unless the order has one of them.
            is_as_before = version_of(lora) == record.version or lora.lora_name in record.names
            names = set(record.names) if is_as_before else set()
            record.orders.append(Order(version_of(lora), names, self.faults.calls))
            self.counts["reloads"] += 1
        record.names.add(lora.lora_name)
        return record.version

    # ---- steps and their outputs ------------------------------------------------------------------------------

    def take_step(self) -> None:
        """One step. Nothing that is thrown into its pass, or into an adapter, makes it raise."""
        computed = self.num_computed_tokens()
        self.pinned = self.pins()
        outputs: list[RequestOutput] = self.call(self.engine.step)
        for output in outputs:
            self.receive(output)
        is_idle = self.live and not outputs and self.num_computed_tokens() == computed
        self.idle = self.idle + 1 if is_idle else 0
        assert self.idle <= MOST_IDLE_STEPS, f"hangs: {self.idle} steps did nothing for {sorted(self.live)}"
        self.follow_records()
        self.counts["steps"] += 1

    def num_computed_tokens(self) -> int:
        return self.engine.get_metrics()["scheduler"]["num_computed_tokens"]

    def receive(self, output: RequestOutput) -> None:
        """Hold an output to what the request alone is answered."""
        assert output.request_id in self.live, f"{output.request_id} had ended, or was aborted"
        live = self.live[output.request_id]
        expected = None if live.version in BAD else disk().answer(live.ask, live.adapter_id, live.version)
        for index, completion in enumerate(output.outputs):
            live.tokens[index] += completion.delta_token_ids
            live.texts[index] += completion.delta_text
            whole = live.tokens[index], live.texts[index]
            assert whole == (completion.token_ids, completion.text), "the deltas are not the whole"
            if expected is not None:
                check_completion(completion, expected.outputs[index])
            if completion.finished() and index not in live.ended:
                self.note_end(live, index, completion.finish_reason, output.error)
        if output.finished:
            if not live.errors:
                check_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
            del self.live[output.request_id]

    def note_end(self, live: Live, index: int, reason: str, error: str | None) -> None:
        """One answer has ended.   error: of the first answer that failed"""
        if reason == "error":
            assert error in live.errors or self.may_fail(live, error), error
            live.errors.add(error)
        else:
            assert live.version not in BAD, "a bad adapter has answered"
        live.ended[index] = reason
        self.counts["error" if reason == "error" else "answers"] += 1
        self.counts["tokens"] += len(live.tokens[index])

    def may_fail(self, live: Live, error: str) -> bool:
        """Whether a request may end with this error: something bad was asked for, or thrown, that concerns it."""
        if live.version in BAD:
            return True
        if not was_thrown(error):
            return "pinned" in error and len(self.pinned - {live.adapter_id}) >= self.options["max_loras"]
        if self.faults.now(Faults.IN_PASSES):
            return True
        return self.was_thrown_at(live.adapter_id, live.version, since=live.added)

    def was_thrown_at(self, adapter_id: int, version: str, since: int) -> bool:
        """Whether something was thrown while this version of the adapter was read, or copied into a slot."""
        return any(
            firing.adapter_id == adapter_id and firing.version in ("", version) and firing.call >= since
            for firing in self.faults.fired
        )

    # ---- what must hold after each operation ------------------------------------------------------------------

    @invariant()
    def is_whole(self) -> None:
        self.follow_records()
        self.check_requests()
        check_blocks(self.engine)
        check_slots(self.engine)
        self.check_adapters()
        if not self.ahead:
            check_engine(self.engine, self.engine.output_processor.states)

    def follow_records(self) -> None:
        """What the engine has forgotten, or taken back, the model forgets, too. There must have been a reason."""
        for adapter_id, record in list(self.records.items()):
            known = self.engine.adapters.adapters.get(adapter_id)
            record.was_read |= adapter_id in self.engine.list_loras()
            if known is None:
                failed = self.may_have_failed(adapter_id, record.orders[-1])
                # One step ahead, what ends with an error has ended before its last output is given.
                assert self.ahead or not self.users(adapter_id), (
                    f"adapter {adapter_id} is forgotten by its requests"
                )
                assert record.leaving or failed or not record.was_read, f"adapter {adapter_id} is forgotten"
                del self.records[adapter_id]
                continue
            while (record.version, record.names) != (version_of(known.request), set(known.names)):
                order = record.orders.pop()
                assert self.may_have_failed(adapter_id, order), f"adapter {adapter_id} is not as in {order}"
                assert record.orders, f"adapter {adapter_id} is {known.request} with the names {known.names}"
                # Names that another adapter has taken meanwhile stay with that one.
                for other_id, other in self.records.items():
                    if other_id != adapter_id:
                        record.names.difference_update(other.names)

    def may_have_failed(self, adapter_id: int, order: Order) -> bool:
        return order.version in BAD or self.was_thrown_at(adapter_id, order.version, since=order.call)

    def check_requests(self) -> None:
        scheduler = self.engine.scheduler
        followers = itertools.chain(*scheduler.followers.values())
        queued = [request.request_id for request in (*scheduler.waiting, *scheduler.running, *followers)]
        assert Counter(queued) == Counter(scheduler.requests.keys()), "a request is in two queues, or in none"
        unended: set[str] = set()
        for request_id, live in self.live.items():
            n = live.ask.n
            ids = (
                {child_id(request_id, i) for i in range(n) if i not in live.ended} if n > 1 else {request_id}
            )
            assert self.ahead or ids <= set(queued), f"{request_id} was lost"
            assert self.engine.knows(request_id), f"{request_id} was lost"
            unended |= ids
        assert set(queued) <= unended, "a request goes on that has ended, or was aborted"
        assert self.engine.has_unfinished_requests() == bool(self.live)
        assert len(scheduler.running) <= self.options["max_num_seqs"]
        adapters = {request.adapter_id for request in scheduler.running} - {0}
        assert len(adapters) <= self.options["max_loras"], (
            f"adapters {adapters} run, more than there are slots"
        )

    def check_adapters(self) -> None:
        info, memory, registry = self.engine.debug_info(), self.engine.list_loras(), self.engine.adapters
        assert registry.adapters.keys() == self.records.keys(), (
            "an adapter is known to the engine or the model alone"
        )
        assert memory | set(info["pinned"]) <= self.records.keys(), "an adapter without a record"
        assert registry.by_name == {name: i for i, record in self.records.items() for name in record.names}
        for adapter_id, record in self.records.items():
            if not self.users(adapter_id):
                is_kept = record.was_read or adapter_id in info["pinned"]
                assert not record.leaving, f"adapter {adapter_id} should be unloaded by now"
                assert is_kept, f"adapter {adapter_id} is known though it was never read"
                assert adapter_id not in memory or record.version not in BAD, (
                    "the record is of what was never read"
                )

    def teardown(self) -> None:
        """Without new requests the others come to an end; without adapters nothing is left of any."""
        if not hasattr(self, "engine"):
            return
        with self.patches:
            self.counts["thrown"] += len(self.faults.fired)
            if sys.exc_info()[1] is self.outer_error:  # else a check has failed already
                self.drain()
                self.check_empty()

    def drain(self) -> None:
        self.faults.left = 0
        check_slot_contents(self.engine)
        num_tokens = sum(live.ask.n * (live.ask.length + live.ask.max_tokens) for live in self.live.values())
        for _ in range(MOST_STEPS_A_TOKEN * num_tokens):
            if self.live:
                self.take_step()
        assert not self.live, f"never answered: {sorted(self.live)}"
        self.take_step()
        for adapter_id in list(self.records):
            assert self.call(self.engine.remove_lora, adapter_id)

    def check_empty(self) -> None:
        engine, info = self.engine, self.engine.debug_info()
        assert not info["states"] and not info["pinned"] and not info["metrics"]["lora"]["by_adapter"]
        assert not engine.list_loras() and set(info["slots"]) == {None}
        pool = engine.scheduler.kv_cache.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        assert not engine.output_processor.states and not engine.core.parallel.parents
        assert not engine.runner.row_sampler.draws


# ---- searches -----------------------------------------------------------------------------------------------------

OPERATIONS = 100  # of one engine


def search(seed: int, engines: int, **settings: Any) -> Counter[str]:
    """What happened in so many engines, of OPERATIONS each. The first failure is raised, shrunk."""
    EngineMachine.counts = counts = Counter()
    run_as_test(
        hypothesis.seed(seed)(EngineMachine),
        settings=hypothesis.settings(
            max_examples=engines,
            stateful_step_count=OPERATIONS,
            deadline=None,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            **{"phases": [hypothesis.Phase.generate, hypothesis.Phase.shrink], **settings},
        ),
    )
    return counts


COLUMNS = {
    "engines": "engines",
    "operations": "calls",
    "steps": "steps",
    "requests": "requests",
    "answers": "answers",
    "tokens": "tokens",
    "failed": "error",
    "aborted": "aborts",
    "refused": "refused",
    "thrown": "thrown",
    "reloads": "reloads",
    "unloads": "unloads",
    "pins": "pins",
}


def row(name: object, counts: Counter[str], seconds: float) -> str:
    return f"{name!s:>8}" + "".join(f"{counts[key]:>11,}" for key in COLUMNS.values()) + f"{seconds:>9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000, help="at least so many calls of engines")
    parser.add_argument("--seed", type=int, default=0, help="of the first 20 engines; the next seeds follow")
    parser.add_argument("--blob", help="of a failure, to see it again; nothing else is done")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.blob:
        replay(args.blob.encode())
        return
    total, num_failures, began = Counter(), 0, time.monotonic()
    print(f"{'seed':>8}" + "".join(f"{name:>11}" for name in COLUMNS) + f"{'seconds':>9}")
    for seed in itertools.count(args.seed):
        started = time.monotonic()
        try:
            search(seed, engines=20)
        except Exception as error:
            num_failures += 1
            traceback.print_exception(error)  # with what hypothesis has noted: the operations, and the blob
        total += EngineMachine.counts
        print(row(seed, EngineMachine.counts, time.monotonic() - started), flush=True)
        if total["calls"] >= args.operations:
            break
    print(row("all", total, time.monotonic() - began))
    sys.exit(f"{num_failures} seeds failed" if num_failures else 0)


def replay(blob: bytes) -> None:
    run_as_test(
        hypothesis.reproduce_failure(hypothesis.__version__, blob)(EngineMachine),
        settings=hypothesis.settings(stateful_step_count=OPERATIONS, deadline=None, database=None),
    )


if __name__ == "__main__":
    main()
