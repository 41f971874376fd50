"""One LLM for several threads: each gets its own answers, all in one batch. Its engine steps in a thread of its own."""

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from labs.kit.overlay import Todo
from minivllm.errors import EngineDeadError
from tests.oracles.invariants import check_engine, check_slot_contents
from tests.worlds.engines import OPTIONS, greedy, tokens_of
from tests.worlds.waiting import PATIENCE, wait_until

PROMPT = [5, 6, 7, 8, 9]
LONG = 200


@pytest.fixture
def llm(world):
    """When the test is over nothing may be left in the engine, and no thread behind it."""
    before = threading.active_count()
    llm = world.llm(max_num_seqs=8)
    yield llm
    check_engine(llm.llm_engine, [])
    del llm
    gc.collect()
    # pytest has the fixture's value still.
    wait_until(lambda: threading.active_count() <= before + 1)


def ask(llm, lora=None, length=12, prompt=PROMPT):
    return llm.generate({"prompt_token_ids": prompt}, greedy(length), use_tqdm=False, lora_request=lora)


class Threads:
    """Calls in threads of their own; `answers` has the result of each, or what it raised."""

    def __init__(self, **calls):
        self.answers = {}
        self.threads = [threading.Thread(target=self._run, args=call) for call in calls.items()]
        for thread in self.threads:
            thread.start()

    def _run(self, name, function):
        try:
            self.answers[name] = function()
        except BaseException as error:
            self.answers[name] = error

    def join(self):
        for thread in self.threads:
            thread.join(PATIENCE)
        return self.answers


def begun(llm, count):
    """Wait until so many requests are in the engine."""
    wait_until(lambda: llm.llm_engine.get_num_unfinished_requests() >= count)


def before_steps(monkeypatch, llm, function):
    """Before each step that has rows the function is called with their number; what it raises the step raises."""
    runner = llm.llm_engine.runner
    launch = runner.launch_model
    monkeypatch.setattr(
        runner,
        "launch_model",
        lambda scheduled: (function(len(scheduled.scheduled)), launch(scheduled))[1],
    )


def test_fifteen_callers_of_one_llm_get_their_own_answers(world, llm):
    names = [None, *world.names]
    start = threading.Barrier(15)

    def call(i):
        start.wait()
        return ask(llm, world.request(names[i % 5]), 8 + i)

    answers = Threads(**{str(i): lambda i=i: call(i) for i in range(15)}).join()

    for i in range(15):
        [output] = answers[str(i)]
        assert tokens_of(output) == world.oracle().greedy(names[i % 5], PROMPT, 8 + i)


def test_callers_run_in_one_batch(world, llm, monkeypatch):
    seen, both = [], threading.Event()

    def look(rows):
        seen.append(rows)
        if len(seen) == 3:  # the first has run alone: wait for the second
            assert both.wait(PATIENCE)

    before_steps(monkeypatch, llm, look)
    first = Threads(first=lambda: ask(llm, length=LONG))
    wait_until(lambda: len(seen) == 3)
    second = Threads(second=lambda: ask(llm, world.request("qv"), 20))
    wait_until(lambda: not llm._thread._calls.empty())
    both.set()

    [short], [long] = second.join()["second"], first.join()["first"]
    assert set(seen) == {1, 2}
    assert tokens_of(long) == world.oracle().greedy(None, PROMPT, LONG)
    assert tokens_of(short) == world.oracle().greedy("qv", PROMPT, 20)


def test_the_model_is_loaded_and_computed_in_one_thread_which_is_not_the_callers(world, monkeypatch):
    threads, llm = set(), world.llm()
    before_steps(monkeypatch, llm, lambda rows: threads.add(threading.current_thread().name))

    ask(llm)
    Threads(other=lambda: ask(llm)).join()

    assert threads == {"minivllm-engine"}


def test_a_thread_that_calls_the_engine_itself_ends_no_callers_requests(world, llm, monkeypatch):
    """Its call is in the way of a step, of a new request and of an abort: all of them wait for it."""
    engine, done = llm.llm_engine, threading.Event()

    def call_it():
        while not done.is_set():
            # A step is in the way of this call, too.
            with contextlib.suppress(RuntimeError), engine._one_call():
                done.wait(0.002)
            done.wait(0.004)

    intruder = threading.Thread(target=call_it)
    intruder.start()
    try:
        callers = Threads(**{str(i): lambda i=i: ask(llm, length=10 + i) for i in range(4)})
        callers.join()
    finally:
        done.set()
        intruder.join()

    for name, answers in callers.answers.items():
        assert tokens_of(answers[0]) == world.oracle().greedy(None, PROMPT, 10 + int(name))


class TestCtrlC:
    def test_ends_the_requests_of_the_main_threads_call_alone(self, world, llm, monkeypatch):
        def interrupt(rows):
            if rows == 3 and not interrupts:
                interrupts.append(os.kill(os.getpid(), signal.SIGINT))

        interrupts = []
        before_steps(monkeypatch, llm, interrupt)
        others = Threads(**{str(i): lambda: ask(llm, world.request("qv"), LONG) for i in range(2)})
        begun(llm, 2)

        with pytest.raises(KeyboardInterrupt):
            ask(llm, length=2000)

        assert interrupts and llm.llm_engine.get_num_unfinished_requests() <= 2
        for [output] in others.join().values():
            assert tokens_of(output) == world.oracle().greedy("qv", PROMPT, LONG)

    def test_at_any_step_leaves_nothing_and_the_next_answers_are_right(self, world, llm, monkeypatch):
        names = [None, *world.names]
        prompts = [{"prompt_token_ids": [*PROMPT, i]} for i in range(5)]
        expected = [world.oracle().greedy(name, [*PROMPT, i], 30) for i, name in enumerate(names)]

        def call():
            loras = [world.request(name) for name in names]
            return llm.generate(prompts, greedy(30), use_tqdm=False, lora_request=loras)

        for step in (0, 1, 2, 3, 5, 9, 17, 29):
            left = itertools.count(step, -1)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                before_steps(
                    patch, llm, lambda rows, left=left: next(left) or os.kill(os.getpid(), signal.SIGINT)
                )
                call()
            assert not llm.llm_engine.has_unfinished_requests()
            assert [tokens_of(output) for output in call()] == expected
            check_engine(llm.llm_engine, [])
            check_slot_contents(llm.llm_engine)

    def test_while_the_model_is_loaded_leaves_no_thread_behind(self, world, monkeypatch):
        from minivllm import LLM, LLMEngine

        may_load, before = threading.Event(), threading.active_count()
        load = LLMEngine.from_engine_args.__func__

        def waits(cls, args):
            os.kill(os.getpid(), signal.SIGINT)
            assert may_load.wait(PATIENCE)
            return load(cls, args)

        monkeypatch.setattr(LLMEngine, "from_engine_args", classmethod(waits))
        with pytest.raises(KeyboardInterrupt):
            LLM(str(world.base), **OPTIONS)
        may_load.set()

        wait_until(lambda: threading.active_count() <= before)


class TestAnEngineThatEnded:
    @pytest.mark.parametrize(
        "error", [Todo("7.4", "x"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
    )
    def test_is_told_to_all_who_wait_and_to_each_who_comes(self, world, monkeypatch, error):
        llm = world.llm(max_num_seqs=8)

        def raise_it(rows):
            if rows == 3:
                raise error

        before_steps(monkeypatch, llm, raise_it)
        answers = Threads(**{str(i): lambda: ask(llm, length=LONG) for i in range(3)}).join()

        expected = Todo if isinstance(error, Todo) else EngineDeadError
        assert {type(answer) for answer in answers.values()} == {expected}
        assert all(isinstance(error, Todo) or type(error).__name__ in str(a) for a in answers.values())
        with pytest.raises(EngineDeadError, match="make a new engine"):
            ask(llm)

    def test_a_call_by_the_engines_own_thread_is_refused(self, world, llm, monkeypatch):
        refused = []

        def call(rows):
            with pytest.raises(RuntimeError, match="in the middle of another call"):
                ask(llm)
            refused.append(True)

        before_steps(monkeypatch, llm, call)
        [output] = ask(llm, length=3)

        assert len(refused) == 3 and tokens_of(output) == world.oracle().greedy(None, PROMPT, 3)

    def test_in_a_forked_process_the_thread_is_no_more(self, llm):
        pid = os.fork()
        if pid == 0:
            try:
                ask(llm)
            except EngineDeadError:
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(pid, 0)

        assert os.waitstatus_to_exitcode(status) == 7


class TestTheEnd:
    def test_of_an_llm_is_that_of_its_thread_and_its_engine(self, world):
        before = set(threading.enumerate())
        for _ in range(3):
            llm = world.llm()
            ask(llm, length=2)
            engine = weakref.ref(llm.llm_engine)
            del llm
            gc.collect()
            assert set(threading.enumerate()) <= before and engine() is None

    def test_an_llm_that_cannot_be_made_leaves_no_thread(self, world):
        before = set(threading.enumerate())
        with pytest.raises(ValueError, match="max_loras"):
            world.llm(max_loras=0)
        with pytest.raises(FileNotFoundError):
            from minivllm import LLM

            LLM(str(world.folder / "nowhere"))

        wait_until(lambda: set(threading.enumerate()) <= before)

    @pytest.mark.nightly
    def test_of_a_process_holds_up_nobody_though_another_thread_generates(self, world):
        code = f"""
import threading, torch
torch.set_num_threads(1)
from minivllm import LLM, SamplingParams
llm = LLM({str(world.base)!r}, **{ {**OPTIONS, "device": "cpu"}!r})
def ask(tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate({{"prompt_token_ids": [5, 6, 7]}}, params, use_tqdm=False)
ask(3)
threading.Thread(target=ask, args=(100,), daemon=True).start()
while not llm.llm_engine.has_unfinished_requests():
    pass
print("done", flush=True)
"""
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
        )

        assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
        assert "Fatal" not in ended.stderr and "Traceback" not in ended.stderr
