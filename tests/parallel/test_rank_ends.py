"""However a rank ends, every request ends within seconds with its name, and no process is left."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist

from minivllm import AsyncLLM
from minivllm.errors import EngineDeadError
from minivllm.serving.engine_process import EngineProcess
from tests.worlds.engines import OPTIONS, greedy, make_engine, run, tokens_of
from tests.worlds.processes import all_end, group_is_left, kill_rank, misinform_others, rank_pids
from tests.worlds.waiting import PATIENCE, threads_end

pytestmark = pytest.mark.nightly

PROMPT = [5, 6, 7, 8, 9]
SOON = 50  # seconds: ten times as long as it takes at most where nothing else runs
OPEN_FILES: list[int] = []  # after each engine; gloo keeps some of the first one's for all that follow
TWO = {"tensor_parallel_size": 2, "threads": 1}


@pytest.fixture
def engine(world):
    """Of two ranks, with three requests in the middle of their answers; nothing of it may be left."""
    threads = threading.active_count()
    made = world.engine(**TWO)
    for i, name in enumerate([None, "qv", "all"]):
        made.add_request(f"r{i}", PROMPT, greedy(200), lora_request=world.request(name))
    made.step()
    made.step()
    pids = rank_pids(made)[1:]
    yield made
    made.executor.shutdown()
    all_end(pids)
    assert not dist.is_initialized()
    threads_end(threads)
    del made
    gc.collect()
    OPEN_FILES.append(len(os.listdir("/proc/self/fd")))
    assert OPEN_FILES[-1] <= OPEN_FILES[0]


def dies(engine, match):
    """It does, in a step, within seconds; and so does every call that comes after."""
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=match):
        while time.monotonic() < started + SOON:
            engine.step()
    assert time.monotonic() < started + SOON
    with pytest.raises(EngineDeadError, match=match):
        engine.step()


class TestARank:
    def test_whose_step_raises_says_what(self, engine):
        misinform_others(engine)

        dies(engine, r"rank 1 of 2 has ended \(IndexError: index 1000000 is out of bounds")

    def test_that_schedules_and_whose_step_raises_says_what(self, engine, monkeypatch):
        def forward(*args):
            raise MemoryError("not a byte left")

        monkeypatch.setattr(engine.runner.model.model.layers[1], "forward", forward)

        dies(engine, r"rank 0 of 2 has ended \(MemoryError: not a byte left\)")

    def test_that_is_slow_is_waited_for(self, world, engine):
        pid = rank_pids(engine)[1]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()

        finished = run(engine)

        names = [None, "qv", "all"]
        expected = [world.oracle().greedy(name, PROMPT, 200) for name in names]
        assert [tokens_of(finished[f"r{i}"]) for i in range(3)] == expected

    def test_that_is_killed_after_it_was_stopped_in_a_step_ends_the_engine(self, engine):
        pid = rank_pids(engine)[1]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()

        dies(engine, r"rank 1 of 2 has ended \(killed by signal 9\)")

    def test_that_is_killed_while_it_reads_an_adapter_ends_the_engine(self, world, engine):
        pid = rank_pids(engine)[1]
        os.kill(pid, signal.SIGSTOP)  # so that it has not answered when it is killed
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        started = time.monotonic()

        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has ended \(killed by signal 9\)"):
            engine.add_lora(world.request("mlp"))

        assert time.monotonic() < started + SOON
        dies(engine, "rank 1 of 2 has ended")

    def test_that_is_stopped_in_its_sleep_is_killed_with_the_engine(self, engine):
        os.kill(rank_pids(engine)[1], signal.SIGSTOP)
        started = time.monotonic()

        engine.executor.shutdown()

        assert time.monotonic() < started + SOON


def test_another_engine_can_be_started_at_once(world):
    engine = world.engine(**TWO)
    leave = engine.executor.others.on_death[0]
    engine.executor.others.on_death[0] = lambda: (time.sleep(0.5), leave())  # as on a machine that is busy
    engine.add_request("a", PROMPT, greedy(200), lora_request=world.request("qv"))
    engine.step()
    kill_rank(engine, 1)
    with pytest.raises(EngineDeadError):
        run(engine)

    another = world.engine(**TWO)

    another.add_request("b", PROMPT, greedy(8), lora_request=world.request("qv"))
    assert tokens_of(run(another)["b"]) == world.oracle().greedy("qv", PROMPT, 8)
    another.executor.shutdown()


def test_of_four_ranks_the_one_that_was_killed_is_named(world):
    engine = world.engine(tensor_parallel_size=4, threads=1)
    pids = rank_pids(engine)[1:]
    engine.add_request("a", PROMPT, greedy(200))
    engine.step()

    kill_rank(engine, 2)

    dies(engine, r"rank 2 of 4 has ended \(killed by signal 9\)")
    all_end(pids)
    group_is_left()


def test_a_ctrl_c_waits_for_the_step_and_the_next_answers_are_right(world):
    llm = world.llm(**TWO, skip_tokenizer_init=True)
    expected = world.oracle().greedy("qv", PROMPT, 8)
    for after in (0.02, 0.05, 0.09):
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                llm.generate([{"prompt_token_ids": PROMPT}] * 3, greedy(100), use_tqdm=False)

        found = llm.generate(
            {"prompt_token_ids": PROMPT}, greedy(8), use_tqdm=False, lora_request=world.request("qv")
        )

        assert tokens_of(found[0]) == expected
    llm.llm_engine.executor.shutdown()


class TestUnderAnEventLoop:
    @pytest.fixture
    def llm(self, world):
        make = partial(make_engine, world.base, None, {**OPTIONS, **TWO})
        made = AsyncLLM(EngineProcess(make, more_calls=(rank_pids, kill_rank)))
        pids = asyncio.run(made.call(rank_pids))
        yield made
        made.shutdown()
        all_end(pids)

    @staticmethod
    async def ends(coroutine):
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has ended \(killed by signal 9\)"):
            await asyncio.wait_for(coroutine, SOON)

    def test_a_rank_that_is_killed_ends_every_request(self, world, llm):
        async def the_rest(outputs):
            async for _ in outputs:
                pass

        async def main():
            running = [llm.generate(PROMPT, greedy(3000), f"r{i}") for i in range(3)]
            for outputs in running:
                await anext(outputs)
            await llm.call(kill_rank, 1)
            for outputs in running:
                await self.ends(the_rest(outputs))
            await self.ends(llm.check_health())

        asyncio.run(main())

    def test_a_rank_that_is_killed_while_nobody_asks_ends_the_engine(self, llm):
        async def main():
            await llm.call(kill_rank, 1)
            until = time.monotonic() + SOON
            while llm._client.error is None and time.monotonic() < until:
                await asyncio.sleep(0.02)
            await self.ends(llm.check_health())

        asyncio.run(main())

    def test_an_engine_that_is_killed_takes_all_ranks_with_it(self, llm):
        pids = asyncio.run(llm.call(rank_pids))

        os.kill(pids[0], signal.SIGKILL)

        all_end(pids)


SCRIPT = """
import sys
from minivllm import LLM, LoRARequest, SamplingParams
from tests.worlds.engines import OPTIONS

llm = LLM(sys.argv[1], **{**OPTIONS, "tensor_parallel_size": 2, "skip_tokenizer_init": True, "threads": 1})
outputs = llm.generate(
    {"prompt_token_ids": [5, 6, 7, 8, 9]},
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    use_tqdm=False,
    lora_request=LoRARequest("qv", 1, sys.argv[2]),
)
print("TOKENS", outputs[0].outputs[0].token_ids, flush=True)
"""


def test_a_script_is_run_by_torchrun(world, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    with by_torchrun(script, world.base, world.path("qv")) as done:
        stdout, stderr = done.communicate(timeout=PATIENCE)

    assert done.returncode == 0, stderr
    assert f"TOKENS {world.oracle().greedy('qv', PROMPT, 8)}" in stdout
    assert stdout.count("TOKENS") == 1


def by_torchrun(script, *args):
    """Two processes of a script."""
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, script, *args], env=environment, stdout=pipe, stderr=pipe, text=True)


ENDLESS = """
import os, sys
from minivllm import LLM, SamplingParams
from tests.worlds.engines import OPTIONS

print("PID", os.environ["RANK"], os.getpid(), flush=True)
llm = LLM(sys.argv[1], **{**OPTIONS, "tensor_parallel_size": 2, "skip_tokenizer_init": True, "threads": 1})
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
while True:
    llm.generate({"prompt_token_ids": [5, 6, 7, 8, 9]}, params, use_tqdm=False)
    print("ANSWERED", flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchruns_that_is_killed_ends_the_others(world, tmp_path, rank):
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    pids = {}

    with by_torchrun(script, world.base) as launcher:
        for line in launcher.stdout:
            if line.startswith("PID"):
                pids[int(line.split()[1])] = int(line.split()[2])
            if line.startswith("ANSWERED"):
                break
        os.kill(pids[rank], signal.SIGKILL)

        all_end(list(pids.values()))
        launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode != 0


def test_two_engines_in_two_processes_serve_at_a_time(world):
    """Each has meeting places of its own."""
    names, made = ["qv", "all"], []
    for _ in names:
        made.append(AsyncLLM(EngineProcess(partial(make_engine, world.base, None, {**OPTIONS, **TWO}))))

    async def answer(llm, name):
        return [o async for o in llm.generate(PROMPT, greedy(40), "a", world.request(name))][-1]

    async def main():
        return await asyncio.gather(*map(answer, made, names))

    try:
        found = [tokens_of(output) for output in asyncio.run(main())]
    finally:
        for llm in made:
            llm.shutdown()
    assert found == [world.oracle().greedy(name, PROMPT, 40) for name in names]
