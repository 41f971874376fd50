"""The number of CPU threads: who decides, what slow steps change, and what others see of it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from minivllm import EngineArgs, LLMEngine
from minivllm.worker import cpu_threads as module
from minivllm.worker.cpu_threads import CPUThreads, available_cores, set_num_threads
from tests.worlds.engines import OPTIONS, greedy, run, tokens_of
from tests.worlds.models import token_ids


class Machine:
    """Four cores and a clock: a step takes 240 ms on one thread, and a second more where threads wait for a core."""

    def __init__(self, free: int) -> None:
        self.free, self.slowness, self.now, self.tried = free, 1.0, 0.0, 0

    def stalls(self, threads: int) -> bool:
        self.tried += 1
        return threads > self.free

    def engine(self) -> CPUThreads:
        return CPUThreads(4, "all that may be used", self.stalls, clock=lambda: self.now)

    def steps(self, threads: CPUThreads, count: int) -> list[int]:
        """Run so many decode steps of a batch of eight; the number of threads of each."""
        numbers = []
        for _ in range(count):
            with threads.around_step():
                number = threads.number
                numbers.append(number)
                seconds = self.slowness * (0.24 / number + (number > self.free))
                self.now += seconds
            threads.observe_step(8, seconds)
        return numbers


class TestSlowSteps:
    def test_all_threads_compute_where_nobody_else_does_and_are_tried_once(self):
        machine = Machine(free=4)
        threads = machine.engine()

        assert machine.steps(threads, 500) == [4] * 500
        assert str(threads) == "4 of 4 CPU threads (all that may be used)"
        assert machine.tried == 1

    @pytest.mark.parametrize(("free", "number"), [(1, 1), (2, 2), (3, 2)])
    def test_neighbours_from_the_start_cost_no_slow_step(self, free, number):
        machine = Machine(free)

        assert machine.steps(machine.engine(), 6) == [number] * 6

    def test_neighbours_that_come_cost_one_slow_step_and_a_summary_names_all_numbers(self):
        machine = Machine(free=4)
        threads = machine.engine()
        machine.steps(threads, 50)
        before = threads.over_all()
        machine.free = 2

        assert machine.steps(threads, 6) == [4, 2, 2, 2, 2, 2]

        assert before == "4 of 4 CPU threads (all that may be used)"
        assert str(threads) == "2 of 4 CPU threads (all that may be used)"
        assert threads.over_all() == (
            "2 to 4 of 4 CPU threads (all that may be used, and fewer while other processes have the cores)"
        )

    def test_beside_neighbours_that_stay_all_threads_are_tried_less_and_less(self):
        machine = Machine(free=2)
        threads = machine.engine()
        machine.steps(threads, 2000)
        before = machine.tried

        assert machine.steps(threads, 1000) == [2] * 1000  # two minutes
        assert machine.tried - before <= 6

    def test_neighbours_that_go_are_noticed_within_a_minute(self):
        machine = Machine(free=2)
        threads = machine.engine()
        machine.steps(threads, 2000)
        machine.free, gone = 4, machine.now
        while machine.steps(threads, 1) != [4]:
            pass

        assert machine.now - gone <= 61
        assert machine.steps(threads, 500) == [4] * 500

    def test_a_step_that_is_slow_for_another_reason_changes_nothing(self):
        machine = Machine(free=4)
        threads = machine.engine()
        for _ in range(20):
            machine.steps(threads, 10)
            machine.slowness = 5.0
            machine.steps(threads, 1)
            machine.slowness = 1.0

        assert threads.number == 4

    def test_steps_that_grow_with_their_contexts_are_not_taken_for_slow(self):
        machine = Machine(free=4)
        threads = machine.engine()
        for _ in range(1000):
            machine.slowness *= 1.005
            machine.steps(threads, 1)

        assert machine.tried == 1

    def test_a_number_that_was_asked_for_stays(self):
        threads = CPUThreads(3, "asked for")
        for _ in range(5):
            threads.observe_step(8, 0.1)
            threads.observe_step(8, 100.0)

        assert str(threads) == "3 CPU threads (asked for)"


class TestWhoDecides:
    @pytest.fixture
    def four_threads(self, monkeypatch):
        """PyTorch has four threads, and the process as many cores, whatever there is here.

        Set in OpenMP: MKL, once PyTorch has told it a number, keeps to that in steps on other numbers.
        """
        before = torch.get_num_threads()
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(module, "available_cores", lambda: 4)
        monkeypatch.setattr(module, "threads_stall", lambda number: False)
        set_num_threads(4)
        yield
        set_num_threads(before)

    def engine(self, world, **options):
        return LLMEngine.from_engine_args(EngineArgs(model=str(world.base), **OPTIONS, **options))

    def test_a_process_that_set_one_thread_stays_at_one(self, world, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert torch.get_num_threads() == 1

        threads = self.engine(world).runner.cpu_threads

        assert (threads.number, threads.stalls) == (1, None)

    def test_cores_and_quota_are_the_most_it_takes(self, world, four_threads, monkeypatch):
        monkeypatch.setattr(module, "available_cores", lambda: 2)

        assert self.engine(world).runner.cpu_threads.most == 2

    def test_omp_num_threads_is_respected(self, world, four_threads, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")

        assert str(self.engine(world).runner.cpu_threads) == "4 CPU threads (OMP_NUM_THREADS)"

    def test_threads_goes_before_everything(self, world, four_threads, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")

        assert self.engine(world, threads=3).debug_info()["threads"] == "3 CPU threads (asked for)"

    @pytest.mark.parametrize("in_a_thread", [False, True])
    def test_the_process_keeps_its_number_and_steps_have_theirs(self, world, four_threads, in_a_thread):
        engine, seen = self.engine(world, threads=2), []
        engine.runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))

        if in_a_thread:
            other = threading.Thread(target=run, args=(engine,))
            other.start()
            other.join()
        else:
            run(engine)

        assert seen == [2, 2, 2]
        assert torch.get_num_threads() == 4

    def test_a_step_that_fails_gives_the_process_its_number_back(self, world, four_threads):
        engine = self.engine(world, threads=2)
        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))
        engine.runner.model.compute_logits = lambda *args: 1 / 0

        [output] = engine.step()

        assert "ZeroDivisionError" in output.error and torch.get_num_threads() == 4

    def test_on_any_number_the_tokens_are_the_same(self, world, four_threads):
        answers = []
        for options in ({"threads": 1}, {"threads": 4}, {}):
            engine = self.engine(world, **options)
            for number, name in enumerate([*world.names, None]):
                prompt = {"prompt_token_ids": token_ids(7 + number, seed=number)}
                engine.add_request(str(number), prompt, greedy(6), lora_request=world.request(name))
            answers.append({name: tokens_of(output) for name, output in run(engine).items()})

        assert answers[0] == answers[1] == answers[2]

    def test_a_gpu_engine_is_left_alone(self, four_threads):
        threads = module.cpu_threads(SimpleNamespace(threads=None, device="cuda:0"))

        assert str(threads) == "4 CPU threads (the GPU computes)"
        assert threads.stalls is None


class TestCores:
    def test_what_a_container_leaves_is_the_most(self, monkeypatch):
        monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")

        assert available_cores() == 1
