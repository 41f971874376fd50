"""Random histories of listeners who are patient, slow, impatient or gone, while adapters come and go."""

import asyncio
import gc
import random
import threading
from collections import Counter

import pytest

from minivllm import AsyncLLM
from tests.worlds.engines import greedy, tiny_world
from tests.worlds.processes import check_is_empty, check_slots, open_requests
from tests.worlds.waiting import some_turns, threads_end, until

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 20, 21], [30, 31, 32]]
LENGTH = 24
REQUESTS = 66
PATIENT = 6  # the last of them: of the base model, and nobody ends them


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(world):
    """(adapter, number of the prompt) -> the tokens of PEFT."""
    return {
        (name, i): world.oracle().greedy(name, prompt, LENGTH)
        for name in [None, *world.names]
        for i, prompt in enumerate(PROMPTS)
    }


class History:
    """One of them: what is done is drawn from `rng`."""

    def __init__(self, world, expected, llm, seed):
        self.world, self.expected, self.llm, self.rng = world, expected, llm, random.Random(seed)
        self.counts = Counter()
        self.num_heard = 0

    async def run(self):
        tasks = [asyncio.create_task(self.listen(str(i))) for i in range(REQUESTS)]
        changes = asyncio.create_task(self.change_adapters(tasks))
        while await self.more_is_heard(tasks):
            waiting = [task for task in tasks[:-PATIENT] if not task.done()]
            if waiting and self.rng.random() < 0.3:
                self.rng.choice(waiting).cancel()
            if self.rng.random() < 0.2:
                await self.llm.abort(str(self.rng.randrange(REQUESTS - PATIENT)))
        await changes
        for task in tasks:
            self.counts["cancelled"] += task.cancelled()
            assert task.cancelled() or task.exception() is None, task.exception()
        gc.collect()
        await some_turns()

    async def more_is_heard(self, tasks, tokens=12):
        """Waits until so many more have been heard, however long that takes. False: everybody has ended."""

        def left():
            return sum(not task.done() for task in tasks)

        heard, before = self.num_heard, left()
        await until(lambda: not left() or left() < before or self.num_heard >= heard + tokens)
        return left()

    async def listen(self, request_id):
        rng = random.Random(f"{request_id} {self.rng.random()}")
        is_patient = int(request_id) >= REQUESTS - PATIENT
        name = None if is_patient else rng.choice([None, *self.world.names])
        row = rng.randrange(len(PROMPTS))
        # Nobody else's pins and unloads end a request of the base model before whoever asked leaves.
        leaves = not is_patient and rng.random() < (0.25 if name else 0.75)
        leaves_after = rng.randrange(1, 8) if leaves else None
        kind = rng.choice(["delta", "delta", "cumulative", "final"])
        await asyncio.sleep(rng.random() * 0.2)
        expected = self.expected[name, row]
        lora = self.world.request(name, load_inplace=rng.random() < 0.1) if name else None
        answers = self.llm.generate(PROMPTS[row], greedy(LENGTH), request_id, lora, output_kind=kind)
        heard = []
        try:
            async for output in answers:
                answer = output.outputs[0]
                heard += answer.delta_token_ids
                self.num_heard += len(answer.delta_token_ids)
                assert answer.token_ids == expected[: len(answer.token_ids)]
                assert kind != "delta" or heard == answer.token_ids
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.03]))
                if leaves_after is not None and len(heard) >= leaves_after:
                    self.counts["left"] += 1
                    return  # the iterator is dropped, not closed
        except (ValueError, RuntimeError) as error:
            # While an adapter is unloaded, or every slot is pinned, nobody can have it.
            assert "unloaded" in str(error) or "pinned" in str(error), error
            self.counts["refused"] += 1
            return
        self.counts[answer.finish_reason] += 1
        assert answer.finish_reason != "length" or answer.token_ids == expected

    async def change_adapters(self, tasks):
        for _ in range(25):
            await self.more_is_heard(tasks, tokens=self.rng.randrange(24))
            adapter_id = self.rng.randrange(1, 5)
            request = self.world.request(self.world.names[adapter_id - 1])
            change = self.rng.choice(["add_lora", "remove_lora", "pin_lora", "unpin_lora"])
            try:
                await getattr(self.llm, change)(request if change == "add_lora" else adapter_id)
            except (ValueError, RuntimeError) as error:
                assert any(word in str(error) for word in ("unloaded", "pinned", "registered")), error
        for adapter_id in range(1, 5):
            await self.llm.unpin_lora(adapter_id)


@pytest.mark.parametrize("where", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_left_of_them_and_every_token_is_pefts(world, expected, seed, where):
    before = threading.active_count()
    options = {"max_num_seqs": 8, "num_kv_blocks": 40, "max_cpu_loras": 3}
    is_far = where == "process"
    llm = (
        AsyncLLM(world.engine_process(**options)) if is_far else AsyncLLM.from_engine(world.engine(**options))
    )
    history = History(world, expected, llm, seed)

    asyncio.run(history.run())

    assert not asyncio.run(llm.call(open_requests)) and not llm._open
    assert not (llm._client._requests if is_far else llm._client.sinks)
    for check in (check_is_empty, check_slots):
        asyncio.run(llm.call(check))
    llm.shutdown()
    if not is_far:
        check_is_empty(llm._client.engine)
        check_slots(llm._client.engine)
    threads_end(before)
    assert history.counts["length"] >= PATIENT and history.counts["cancelled"] and history.counts["left"]
