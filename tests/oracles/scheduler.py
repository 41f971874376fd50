"""A world around the scheduler: a toy model that computes checksums, and the laws that every step must keep.

The toy's "keys and values" of a token are a checksum of its adapter's weights and of all tokens up to it.
The toy writes them into the blocks it is told to, and reads a request's whole context back from its blocks
before it picks the next token. A block owned twice, found under the wrong key or not computed at all is
then a wrong checksum, as it would be a wrong token in a real engine.
"""

from collections import Counter
from itertools import count

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import RELOAD_PENDING
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.observe.recorder import WatchedLine, skips
from minivllm.sampling_params import SamplingParams

VOCAB = 7
TOO_LONG = 3000  # no world here has that many steps of work


class ShownRequest(Request):
    """A request that a failing test shows in a few words."""

    def __repr__(self):
        return f"{self.request_id} of {f'adapter {self.adapter_id}' if self.adapter_id else 'base'}"


def lora(adapter_id):
    """The LoRARequest of an adapter; None for base (0)."""
    return LoRARequest(f"adapter-{adapter_id}", adapter_id, f"/adapters/{adapter_id}") if adapter_id else None


def checksums(weights, token_ids):
    """One number a token: of the weights and of all tokens up to it."""
    value, values = hash(weights), []
    for token_id in token_ids:
        value = hash((value, weights, token_id))
        values.append(value)
    return values


def served_alone(weights, prompt, num_tokens):
    """The tokens that a request gets when nobody else is there."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(checksums(weights, token_ids)[-1] % VOCAB)
    return token_ids[len(prompt) :]


def schedule(scheduler):
    """A step, with whom it asked beside it, and all whom it passes over: `asked`, `skipped` and `num_skipped`."""
    output = scheduler.schedule()
    output.asked = scheduler.policy.asked_in(output)
    output.skipped, output.num_skipped = skips(scheduler, output, most=TOO_LONG)
    return output


class World:
    """A scheduler, the toy model it drives, and adapters that come and go.

    loads       adapter -> the number of its present load, for those loaded
    generation  adapter -> reloads asked for so far; the weights are (adapter, generation)
    held        (adapter, generation) -> why its requests may not join
    in_place    adapter -> the generation whose weights are in place: that of its oldest unfinished request
    """

    def __init__(
        self,
        *,
        max_loras=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_lora_wait_steps=8,
        block_size=4,
        num_blocks=150,
        enable_prefix_caching=True,
        max_model_len=None,
        most_tokens_beside_decodes=None,
    ):
        self.max_loras = max_loras
        self.config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_lora_wait_steps)
        self.block_size = block_size
        self.held = {}
        self.loads, self.generation, self.in_place = {}, Counter(), Counter()
        self.memory = {}
        self.requests = {}
        self.now = 0
        self._loads, self._ids = count(1), count()
        self._pinned = set()
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(
                block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching
            ),
            LoRAConfig(max_loras=max_loras) if max_loras else None,
            max_model_len=max_model_len,
            adapter_identity=self.loads.get,
            pinned_adapters=self._pinned,
            why_wait=self.why_wait,
            most_tokens_beside_decodes=most_tokens_beside_decodes,
            policy=WatchedLine(),
        )

    @property
    def pinned(self):
        return self._pinned

    @pinned.setter
    def pinned(self, adapter_ids):
        self._pinned.clear()
        self._pinned.update(adapter_ids)

    def why_wait(self, request):
        """As the engine answers: `held` says why, or an unfinished request belongs to an earlier load."""
        others = [r for r in self.scheduler.requests.values() if r.adapter_id == request.adapter_id]
        earlier = any(r.adapter_generation < request.adapter_generation for r in others)
        return self.held.get((request.adapter_id, request.adapter_generation)) or (
            RELOAD_PENDING if earlier else None
        )

    def add(self, adapter_id=0, prompt=(1,), max_tokens=4, request_id=None, **params):
        request = ShownRequest(
            request_id or f"r{next(self._ids)}",
            list(prompt),
            SamplingParams(max_tokens=max_tokens, **params),
            lora(adapter_id),
            arrival_time=float(self.now),
            adapter_generation=self.generation[adapter_id],
        )
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        return request

    def add_all(self, *adapter_ids, **kwargs):
        return [self.add(adapter_id, **kwargs) for adapter_id in adapter_ids]

    def abort(self, *requests):
        self.scheduler.finish_requests([r.request_id for r in requests], RequestStatus.FINISHED_ABORTED)

    def reload(self, adapter_id):
        self.generation[adapter_id] += 1

    def step(self, **kwargs):
        output = self.schedule()
        self.finish_step(output, **kwargs)
        return output

    def schedule(self):
        self._reload_what_is_drained()
        waiting = {r.request_id: r for r in self.scheduler.waiting}
        output = schedule(self.scheduler)
        self.check_output(output, waiting)
        self.check_state()
        return output

    def finish_step(self, output, tokens_each=1):
        sampled = self.execute(output, tokens_each)
        changed = self.scheduler.update_from_output(output, sampled)
        self.now += 1
        assert self.now < TOO_LONG, (
            f"no end after {self.now} steps: running {self.scheduler.running}, waiting {self.scheduler.waiting}"
        )
        self.check_state()
        return changed

    def run(self):
        """Step until every request is finished; returns the outputs."""
        outputs = []
        while self.scheduler.has_unfinished_requests():
            outputs.append(self.step())
        return outputs

    def execute(self, output, tokens_each=1):
        """Write what is new, then read every context back. Several tokens each, as a speculator would."""
        for adapter_id in {r.adapter_id for r in output.running} - {0}:
            if adapter_id not in self.loads:
                self.loads[adapter_id] = next(self._loads)
        live = [s for s in output.scheduled if not s.request.is_finished]
        for scheduled in live:
            request, first = scheduled.request, scheduled.request.num_computed_tokens
            assert self.in_place[request.adapter_id] == request.adapter_generation, (
                f"{request} runs while another load of its adapter is in place"
            )
            for position in range(first, first + scheduled.num_new_tokens):
                self.memory[self._place(request, position)] = self._checksums(request)[position]
        sampled = {}
        for scheduled in live:
            request = scheduled.request
            context = request.num_computed_tokens + scheduled.num_new_tokens
            read = [self.memory.get(self._place(request, position)) for position in range(context)]
            right = [mine == known for mine, known in zip(read, self._checksums(request))]
            assert all(right), (
                f"{request} reads keys and values at position {right.index(False)} that are not its own: "
                "computed for other weights or other tokens, or not at all"
            )
            assert scheduled.samples == (context == request.num_tokens), f"samples is wrong: {scheduled}"
            if scheduled.samples:
                sampled[request.request_id] = served_alone(
                    self._weights(request), request.all_token_ids, tokens_each
                )
        return sampled

    def waited(self, request):
        """Steps that a request, waiting or not, has waited for a slot."""
        return self.scheduler.waiting.wait_steps(request)

    def check_output(self, output, waiting_before):
        scheduler = self.scheduler
        tokens = {s.request: s.num_new_tokens for s in output.scheduled}
        total = sum(tokens.values())
        assert all(n > 0 for n in tokens.values()), f"scheduled without a token: {tokens}"
        assert len(tokens) == len(output.scheduled), f"scheduled twice: {output.scheduled}"
        assert total == output.total_num_scheduled_tokens, (
            f"{total} tokens, total_num_scheduled_tokens says {output.total_num_scheduled_tokens}: {tokens}"
        )
        budget = self.config.max_num_batched_tokens
        assert total <= budget, f"{total} tokens in a step that may have {budget}: {tokens}"
        for request, num_new_tokens in tokens.items():
            first = request.num_computed_tokens
            assert first + num_new_tokens <= request.num_tokens, (
                f"{request} is to compute tokens {first} to {first + num_new_tokens - 1}, "
                f"and it has {request.num_tokens}"
            )
        assert output.num_skipped == len(output.skipped), (
            f"{output.num_skipped} passed over, and these are named: {output.skipped}"
        )
        assert output.running == scheduler.running, f"{output.running} is not {scheduler.running}"
        assert tokens.keys() <= set(scheduler.running), (
            f"scheduled though not running: {sorted(map(str, tokens.keys() - set(scheduler.running)))}"
        )
        assert len(scheduler.running) <= self.config.max_num_seqs, f"too many run: {scheduler.running}"
        taken = self.pinned | {r.adapter_id for r in scheduler.running} - {0}
        assert len(taken) <= max(self.max_loras, len(self.pinned)), (
            f"this step's requests and pins want adapters {sorted(taken)} in slots at once, and max_loras is "
            f"{self.max_loras}: whoever came last should have waited"
        )
        for request in scheduler.running:
            if request.request_id in waiting_before:
                overtaken = [r for r in scheduler.waiting if r.adapter_id == request.adapter_id]
                assert all(r.arrival_order > request.arrival_order for r in overtaken), (
                    f"{request} was admitted before {overtaken[0]}: of those who want the same, first come first served"
                )

    def check_state(self):
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.block_pool
        for request in scheduler.running:
            assert request.status == RequestStatus.RUNNING, (
                f"{request} runs, and its status is {request.status!r}"
            )
        for request in scheduler.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), (
                f"{request} waits, and its status is {request.status!r}"
            )
            assert not request.block_ids, f"{request} waits and keeps blocks {request.block_ids}"
            assert not request.num_computed_tokens, (
                f"{request} waits without blocks, yet with computed tokens"
            )
        unfinished = [*scheduler.running, *scheduler.waiting]
        assert sorted(scheduler.requests) == sorted(r.request_id for r in unfinished), (
            f"the scheduler knows {sorted(scheduler.requests)}, its queues hold {unfinished}"
        )
        orders = [r.arrival_order for r in scheduler.waiting]
        assert orders == sorted(orders), f"not by arrival any more: {scheduler.waiting}"
        owners = Counter(block_id for r in self.requests.values() for block_id in r.block_ids)
        for request in scheduler.running:
            assert len(set(request.block_ids)) == len(request.block_ids), (
                f"{request} has a block twice: {request.block_ids}"
            )
        assert owners[0] == 0, "the null block was handed out"
        counts = [owners[block_id] for block_id in range(pool.num_blocks)]
        assert pool.ref_cnt == counts, f"requests use the blocks {counts} times, ref_cnt says {pool.ref_cnt}"
        free = {b for b in range(1, pool.num_blocks) if owners[b] == 0}
        assert set(pool.free) == free, (
            f"nobody uses blocks {free}, and those called free are {set(pool.free)}"
        )
        assert {h: b for b, h in pool.hash_of.items()} == pool.block_of, "hash_of and block_of disagree"

    def expected_tokens(self, request):
        return served_alone(self._weights(request), request.prompt_token_ids, request.num_output_tokens)

    def _weights(self, request):
        return (request.adapter_id, request.adapter_generation if request.adapter_id else 0)

    def _checksums(self, request):
        return checksums(self._weights(request), request.all_token_ids)

    def _place(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size

    def _reload_what_is_drained(self):
        for adapter_id, newest in self.generation.items():
            unfinished = [r for r in self.scheduler.requests.values() if r.adapter_id == adapter_id]
            wanted = min((r.adapter_generation for r in unfinished), default=newest)
            if self.in_place[adapter_id] < wanted:
                self.in_place[adapter_id] = wanted
                self.loads.pop(adapter_id, None)
