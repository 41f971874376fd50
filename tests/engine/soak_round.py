"""One engine with random options, driven through random requests and random changes of its adapters."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soak_answers import Sent, verify_answers
from soak_disk import SPOILED, TINY, AdapterDisk, VersionedOracle

from minivllm import EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from tests.oracles.invariants import (
    check_empty,
    check_engine,
    check_running_fit_the_slots,
    check_slot_contents,
)

NUM_ADAPTERS = 6
LONGEST_PROMPT = 26
MOST_TOKENS = 12


@dataclass
class Report:
    """What happened, all rounds together."""

    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{self.rounds} rounds, {self.steps} steps, {self.seconds:.0f} s: {counts}"


class Round:
    """One engine with random options, driven until all its requests have ended."""

    def __init__(
        self, disk: AdapterDisk, oracle: VersionedOracle, rng: random.Random, report: Report
    ) -> None:
        self.disk, self.oracle, self.rng, self.report = disk, oracle, rng, report
        self.loads: dict[int, int] = {}  # adapter id -> load id, while the last step was computed
        self.engine = self._engine()
        self.live: dict[str, Sent] = {}
        self.done: list[Sent] = []
        self.num_sent = 0
        self.leaving: set[int] = set()
        self.owed: Counter[int] = Counter()  # adapter id -> what a reload promised to whoever comes after it
        self.orders: dict[int, list[int]] = defaultdict(list)  # adapter id -> reloads that may be pending
        self.bad: set[int] = set()  # adapters whose folders were bad at some time since the last step
        self.version_of: dict[int, int] = {}  # load id -> version
        self.running: dict[tuple[str, int], int] = {}  # (request id, preemptions) -> load id, likewise
        self.prefixes = [self._ids(rng.randint(8, 18)) for _ in range(2)]
        self._watch()

    def _engine(self) -> LLMEngine:
        rng = self.rng
        max_loras, block_size = rng.choice([2, 2, 3]), rng.choice([2, 4, 8])
        longest = -(-(LONGEST_PROMPT + MOST_TOKENS) // block_size)
        args = EngineArgs(
            model=str(self.disk.base),
            dtype="float64",
            max_model_len=64,
            enable_lora=True,
            max_loras=max_loras,
            max_lora_rank=16,
            max_cpu_loras=max_loras + rng.choice([0, 1, 2]),
            punica_backend=rng.choice(["loops", "grouped"]),
            block_size=block_size,
            num_kv_blocks=1 + int(longest * rng.uniform(1.2, 3)),
            enable_prefix_caching=rng.random() < 0.85,
            max_num_seqs=rng.choice([4, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 48]),
            max_lora_wait_steps=rng.choice([2, 6, 12]),
        )
        return LLMEngine(args.create_engine_config(), warm_up=rng.random() < 0.5)

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(3, TINY["vocab_size"]) for _ in range(count)]

    # ---- watching -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """See what is in memory at the moment a step is computed, and every reload at the moment it happens."""
        runner, manager = self.engine.runner, self.engine.adapters.manager
        launch_model, replace_adapter = runner.launch_model, manager.replace_adapter

        def watched_launch_model(output: Any) -> Any:
            self._note_loads()
            result = launch_model(output)
            check_running_fit_the_slots(self.engine)
            self.loads = {i: lora.load_id for i, lora in manager.list_adapters().items()}
            before, self.running = self.running, {}
            for request in output.running:
                turn = (request.request_id, request.num_preemptions)
                load = self.running[turn] = self.loads.get(request.adapter_id, 0)
                assert before.get(turn, load) == load, f"{request.request_id} got other weights midway"
            return result

        def watched_replace_adapter(lora: Any) -> None:
            arrivals = [
                self.live[i].arrival
                for i, r in self.engine.scheduler.requests.items()
                if r.adapter_id == lora.id
            ]
            assert any(not any(a < order for a in arrivals) for order in self.orders[lora.id]), (
                "reload too early"
            )
            self.report.counts["reloads"] += 1
            replace_adapter(lora)

        runner.launch_model, manager.replace_adapter = watched_launch_model, watched_replace_adapter

    def _note_loads(self) -> None:
        for adapter_id, lora in self.engine.adapters.manager.list_adapters().items():
            if lora.load_id not in self.version_of:
                assert self.disk.is_good(adapter_id), f"adapter {adapter_id} was read while it was bad"
                self.version_of[lora.load_id] = self.disk.state[adapter_id]

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An engine call, whose errors are the caller's to judge, and a look at the engine after it."""
        try:
            return function(*args, **kwargs)
        finally:
            self._note_loads()

    def _look(self) -> None:
        check_engine(self.engine, self.live)
        self.leaving &= {sent.adapter_id for sent in self.live.values()}

    def _order(self, adapter_id: int, reload: bool) -> None:
        """Note a reload before it is asked for: it may be done at once."""
        if reload:
            self.orders[adapter_id].append(self.num_sent)

    def _take_back_order(self, adapter_id: int, reload: bool) -> None:
        """A refused order stands no more. Orders between two arrivals share a number: the others stay."""
        if reload:
            self.orders[adapter_id].remove(self.num_sent)

    def _forget_orders_done(self) -> None:
        """After a step, only those reloads are pending that an older request stands in the way of."""
        for adapter_id, orders in self.orders.items():
            arrivals = [sent.arrival for sent in self.live.values() if sent.adapter_id == adapter_id]
            self.orders[adapter_id] = [order for order in orders if any(a < order for a in arrivals)]

    # ---- what a step brings ---------------------------------------------------------------------------------

    def step(self) -> None:
        pins = set(self.engine.adapters.pinned)
        self.loads = {}
        outputs = self._call(self.engine.step)
        for output in outputs:
            self._take(output, pins)
        self.report.steps += 1
        self.bad = {adapter_id for adapter_id in self.disk.state if not self.disk.is_good(adapter_id)}
        self._forget_orders_done()
        self._look()

    def _take(self, output: RequestOutput, pins: set[int]) -> None:
        sent = self.live.get(output.request_id)
        assert sent is not None, f"{output.request_id} was answered after its end"
        completion = output.outputs[0]
        version = (
            self.version_of[self.loads[sent.adapter_id]]
            if completion.delta_token_ids and sent.adapter_id
            else 0
        )
        sent.tokens += completion.delta_token_ids
        sent.versions += [version] * len(completion.delta_token_ids)
        assert sent.tokens == completion.token_ids, "the pieces do not add up"
        assert version >= sent.owed or not completion.delta_token_ids, (
            f"{sent} got older weights than it is owed"
        )
        self.report.counts["cached tokens"] += output.num_cached_tokens * output.finished
        if output.finished:
            sent.reason = completion.finish_reason
            if sent.reason == "error":
                self._judge_error(sent, output.error, pins)
            self._end(sent)

    def _judge_error(self, sent: Sent, error: str, pins: set[int]) -> None:
        if "pinned" in error:
            assert len(pins) == self.engine.adapters.manager.lora_slots and sent.adapter_id not in pins, error
        else:
            # It may have been mended since a reload failed: the request is told with the next step.
            assert sent.adapter_id in self.bad, f"adapter {sent.adapter_id} is good but: {error}"

    def _end(self, sent: Sent) -> None:
        del self.live[sent.request_id]
        self.done.append(sent)
        self.report.counts[f"finished: {sent.reason}"] += 1

    # ---- what happens between steps -------------------------------------------------------------------------

    def lora_request(self, adapter_id: int, load_inplace: bool = False) -> LoRARequest | None:
        if not adapter_id:
            return None
        return LoRARequest(
            f"a{adapter_id}", adapter_id, str(self.disk.path(adapter_id)), load_inplace=load_inplace
        )

    def arrive(self) -> None:
        adapter_id = self.rng.randrange(NUM_ADAPTERS + 1)
        reload = bool(adapter_id) and self.rng.random() < 0.08
        if reload and self.rng.random() < 0.7 and self.disk.is_good(adapter_id):
            self.disk.write(adapter_id)
        prefix = self.rng.choice([[], *self.prefixes])
        prompt = prefix + self._ids(self.rng.randint(1, LONGEST_PROMPT - len(prefix)))
        self.send(adapter_id, prompt, self._params(), reload)

    def send(self, adapter_id: int, prompt: list[int], params: SamplingParams, reload: bool = False) -> None:
        """A request that must be refused for what is known of its adapter, or else be taken."""
        request_id, arrival = f"r{self.num_sent}", self.num_sent
        self._order(adapter_id, reload)
        refusal = self._refusal(adapter_id, reload)
        try:
            self._call(
                self.engine.add_request,
                request_id,
                prompt,
                params,
                lora_request=self.lora_request(adapter_id, reload),
            )
        except (ValueError, FileNotFoundError) as error:
            assert refusal, f"refused without a reason: {error}"
            self._take_back_order(adapter_id, reload)
            self.report.counts["refused"] += 1
        else:
            assert not refusal, f"taken although {refusal}"
            if reload and self.disk.is_good(adapter_id):
                self.owed[adapter_id] = self.disk.state[adapter_id]
            owed = self.owed[adapter_id]
            if reload and not self.disk.is_good(adapter_id):
                owed = self.disk.num_versions + 1  # an error, or what mends it; never the old weights
            self.live[request_id] = Sent(request_id, prompt, params, adapter_id, arrival, owed)
            self.num_sent += 1
        self._look()

    def _params(self) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.randint(1, MOST_TOKENS)
        return SamplingParams(
            temperature=0 if rng.random() < 0.85 else 0.8,
            seed=rng.choice([None, 7]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 0, min(3, max_tokens)]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([None, None, self._ids(4)]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            **rng.choice([{}, {}, {}, self._penalties()]),
        )

    def _penalties(self) -> dict[str, object]:
        rng = self.rng
        return {
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            "repetition_penalty": rng.uniform(0.5, 2),
            "logit_bias": {token: rng.uniform(-9, 9) for token in self._ids(3)},
        }

    def _refusal(self, adapter_id: int, read_now: bool) -> str | None:
        """Why the engine must refuse a request with this adapter; None if it must take it."""
        adapters = self.engine.adapters
        if not adapter_id:
            return None
        if adapter_id in self.leaving:
            return "it is being unloaded"
        pins = set(adapters.pinned)
        if len(pins) >= adapters.manager.lora_slots and adapter_id not in pins:
            return "all slots are pinned"
        if self.disk.is_bad_at_first_sight(adapter_id) and (read_now or adapter_id not in adapters.adapters):
            return f"its folder is bad: {self.disk.state[adapter_id]}"
        return None

    def send_nonsense(self) -> None:
        """Requests that can never be served change nothing."""
        taken = self.lora_request(self.rng.choice(sorted(self.engine.adapters.adapters) or [1]))
        params = SamplingParams(max_tokens=3)
        nonsense = [
            ("x", [], params, None),
            ("x", [5] * 64, params, None),
            ("x", [5, TINY["vocab_size"]], params, None),
            ("x", [5], SamplingParams(max_tokens=3, stop_token_ids=[999]), None),
        ]
        if self.live:
            nonsense.append((self.rng.choice(sorted(self.live)), [5], params, None))
        if taken.lora_int_id in self.engine.adapters.adapters:
            elsewhere = LoRARequest("z", taken.lora_int_id, str(self.disk.base))
            nonsense += [
                ("x", [5], params, elsewhere),
                ("x", [5], params, LoRARequest(taken.lora_name, 99, taken.lora_path)),
            ]
        request_id, prompt, params, lora_request = self.rng.choice(nonsense)
        try:
            self._call(self.engine.add_request, request_id, prompt, params, lora_request=lora_request)
        except ValueError:
            self.report.counts["nonsense"] += 1
        else:
            raise AssertionError(f"taken: {request_id} {prompt} {params} {lora_request}")
        self._look()

    def abort(self) -> None:
        for request_id in self.rng.sample(sorted(self.live), min(len(self.live), self.rng.choice([1, 1, 3]))):
            sent = self.live[request_id]
            sent.reason = "abort"
            self._call(self.engine.abort_request, request_id)
            self._end(sent)
        self._look()

    def load_ahead(self, reload: bool = False) -> None:
        adapter_id = self.rng.randint(1, NUM_ADAPTERS)
        if reload and self.disk.is_good(adapter_id):
            self.disk.write(adapter_id)
        self.add(adapter_id, reload)

    def add(self, adapter_id: int, reload: bool = False) -> None:
        """Load ahead, or read again; refused for a bad folder, an unload to come, or no room."""
        manager = self.engine.adapters.manager
        full = len(manager.list_adapters()) == manager.capacity
        self._order(adapter_id, reload)
        try:
            self._call(self.engine.add_lora, self.lora_request(adapter_id, reload))
        except (ValueError, OSError) as error:
            self._take_back_order(adapter_id, reload)
            assert adapter_id in self.leaving or not self.disk.is_good(adapter_id), error
        except RuntimeError as error:
            self._take_back_order(adapter_id, reload)
            assert full and adapter_id not in manager.list_adapters(), error
        else:
            if reload and self.disk.is_good(adapter_id):
                self.owed[adapter_id] = self.disk.state[adapter_id]
        self._look()

    def reload(self) -> None:
        self.load_ahead(reload=True)

    def unload(self) -> None:
        adapter_id = self.rng.randint(1, NUM_ADAPTERS)
        known = adapter_id in self.engine.adapters.adapters
        assert self._call(self.engine.remove_lora, adapter_id) == known
        if known:
            self.leaving.add(adapter_id)
        self.report.counts["unloads"] += known
        self._look()

    def pin(self) -> None:
        adapters = self.engine.adapters
        adapter_id = self.rng.randint(1, NUM_ADAPTERS)
        pins, in_memory = set(adapters.pinned), adapter_id in adapters.manager.list_adapters()
        try:
            self._call(self.engine.pin_lora, adapter_id)
        except RuntimeError as error:
            assert len(pins | {adapter_id}) > adapters.manager.lora_slots, error
        except (ValueError, OSError) as error:
            unknown = adapter_id not in adapters.adapters
            assert unknown or (not in_memory and not self.disk.is_good(adapter_id)), error
        else:
            assert adapter_id in adapters.pinned
            self.report.counts["pins"] += 1
        self._look()

    def unpin(self) -> None:
        for adapter_id in list(self.engine.adapters.pinned):
            assert self._call(self.engine.unpin_lora, adapter_id)
            assert adapter_id not in self.engine.adapters.pinned
        self._look()

    def spoil(self) -> None:
        adapter_id = self.rng.randint(1, NUM_ADAPTERS)
        if not self.disk.is_good(adapter_id):
            return
        self.disk.spoil(adapter_id, self.rng.choice([*SPOILED, *["nan"] * 4]))
        self.bad.add(adapter_id)
        if self.orders[adapter_id]:
            self.owed[adapter_id] = 0  # the reload may fail now, and the old weights stay

    def mend(self) -> None:
        for adapter_id in range(1, NUM_ADAPTERS + 1):
            if not self.disk.is_good(adapter_id):
                self.disk.write(adapter_id)

    # ---- from the first request to the last check -----------------------------------------------------------

    def run(self, num_requests: int) -> None:
        actions = {
            self.abort: 4,
            self.send_nonsense: 3,
            self.load_ahead: 2,
            self.reload: 2,
            self.unload: 3,
            self.pin: 3,
            self.unpin: 5,
            self.spoil: 3,
            self.mend: 5,
        }
        crowd = self.rng.choice([6, 14])
        while self.num_sent < num_requests:
            while len(self.live) < crowd and self.num_sent < num_requests and self.rng.random() < 0.6:
                self.arrive()
            if self.rng.random() < 0.3:
                [action] = self.rng.choices(list(actions), list(actions.values()))
                action()
            self.step()
            if self.report.steps % 25 == 0:
                check_slot_contents(self.engine)
        self.unpin()
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        self._finish()

    def _finish(self) -> None:
        assert not self.live, f"never answered: {sorted(self.live)}"
        check_slot_contents(self.engine)
        self.report.counts["tokens verified"] += verify_answers(self.done, self.oracle)
        summary, lora = self.engine.trace.summary(), self.engine.get_metrics()["lora"]
        for name in ("chunks", "mixed_steps", "preemptions", "prefix_hits", "skips"):
            self.report.counts[name.replace("_", " ")] += summary[name]
        for name in ("loads", "evictions", "cpu_evictions"):
            self.report.counts[name.replace("_", " ")] += lora[name]
        for adapter_id in list(self.engine.adapters.adapters):
            self.engine.remove_lora(adapter_id)
        check_empty(self.engine)
