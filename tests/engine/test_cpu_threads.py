"""The number of CPU threads: who decides, what is measured, when it is measured again, and what others see of it."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from allocations import live_bytes
from tiny_engine import OPTIONS, greedy, run, tiny_world, tokens_of
from tiny_models import token_ids

from minivllm import EngineArgs, LLMEngine
from minivllm.worker import cpu_threads as module
from minivllm.worker import model_runner
from minivllm.worker.cpu_threads import PASSES, CPUThreads, cpu_quota, cpu_threads, numbers_up_to
from minivllm.worker.openmp import set_num_threads

PARTS = 10


class Machine:
    """Four cores and their own clock: a product takes 12 ms on one, `stall` more with threads for cores taken."""

    def __init__(self, free: int, stall: float = 0.5) -> None:
        self.free, self.stall, self.slowness = free, stall, 1.0
        self.now, self.threads, self.calls = 0.0, 4, 0

    def seconds(self) -> float:
        """Of one product on the number of threads that is set."""
        stalled = self.stall if self.threads > self.free else 0.0
        return self.slowness * (0.012 / self.threads + stalled)

    def product(self) -> None:
        self.calls += 1
        self.now += self.seconds()

    def set_threads(self, number: int) -> None:
        self.threads = number

    def chooser(self, candidates=(1, 2, 3, 4)) -> CPUThreads:
        parts = [self.product] * PARTS
        return CPUThreads(
            1,
            "not measured yet",
            candidates,
            parts,
            clock=lambda: self.now,
            apply=self.set_threads,
            current=lambda: self.threads,
        )

    def steps(self, threads: CPUThreads, count: int, products: int = 20) -> float:
        """Run so many decode steps of a batch of eight; seconds with all that was measured meanwhile."""
        started = self.now
        for _ in range(count):
            threads.before_step()
            with threads.in_use():
                seconds = products * self.seconds()
                self.now += seconds
            threads.observe_step(8, seconds)
        return self.now - started


class TestMeasuring:
    @pytest.mark.parametrize("free", [1, 2, 3, 4])
    def test_takes_as_many_threads_as_there_are_free_cores(self, free):
        threads = Machine(free).chooser()

        threads.measure()

        assert threads.number == free
        assert str(threads) == f"{free} of 4 CPU threads (measured)"

    def test_gives_up_a_number_once_it_is_slower_than_the_best(self):
        machine = Machine(free=1, stall=100.0)

        machine.chooser().measure()

        # One thread's passes, and a product each of two numbers: a whole pass of either would take 1000 s.
        assert machine.calls == (1 + PASSES) * PARTS + 2
        assert machine.now < 201

    def test_takes_the_smaller_of_two_numbers_that_are_alike(self):
        machine = Machine(free=4)
        machine.seconds = lambda: 0.012 if machine.threads == 1 else 0.0118

        threads = machine.chooser()
        threads.measure()

        assert threads.number == 1

    def test_does_nothing_where_there_is_nothing_to_choose(self):
        machine = Machine(free=1)
        threads = CPUThreads(3, "asked for", clock=lambda: machine.now, apply=machine.set_threads)

        threads.measure()
        threads.before_step()
        threads.observe_step(8, 100.0)

        assert (threads.number, threads.measurements, machine.calls) == (3, 0, 0)
        assert str(threads) == "3 CPU threads (asked for)"


class TestMeasuringAgain:
    def test_an_engine_that_was_not_warmed_up_measures_before_its_first_step(self):
        threads = Machine(free=2).chooser()

        threads.before_step()

        assert (threads.number, threads.measurements) == (2, 1)

    def test_neighbours_that_come_cost_one_slow_step_and_a_measurement(self):
        machine = Machine(free=4)
        threads = machine.chooser()
        machine.steps(threads, 10)
        machine.free = 2

        seconds = machine.steps(threads, 10)

        assert threads.number == 2
        stalled, step_on_two = 20 * (0.003 + 0.5), 20 * 0.006
        assert (
            seconds < stalled + 10 * step_on_two + 3
        )  # and the measurement, with a product each of 3 and 4 threads

    def test_neighbours_that_go_are_noticed(self):
        machine = Machine(free=1)
        threads = machine.chooser()
        machine.steps(threads, 10)
        machine.free = 4

        machine.steps(threads, 1000)

        assert threads.number == 4

    def test_a_quiet_machine_is_measured_less_and_less(self):
        machine = Machine(free=4)
        threads = machine.chooser()

        seconds = machine.steps(threads, 100_000)

        measuring = seconds - 100_000 * 20 * 0.003
        assert (
            0.9 * seconds / module.LONGEST_PAUSE < threads.measurements < seconds / module.LONGEST_PAUSE + 12
        )
        assert measuring < 0.02 * seconds
        assert threads.number == 4

    def test_a_machine_that_is_slower_as_a_whole_is_not_measured_for_it(self):
        machine = Machine(free=2)
        threads = machine.chooser()
        machine.steps(threads, 20_000)
        machine.slowness = 3.0
        before, started = threads.measurements, machine.now

        machine.steps(threads, 2_000)

        # One for the news; then it is known how long a step takes here.
        assert threads.number == 2
        assert threads.measurements - before <= 2 + (machine.now - started) / module.LONGEST_PAUSE

    def test_numbers_that_are_alike_do_not_take_turns(self):
        machine = Machine(free=4)
        # Two threads and three are alike, but for every second measurement, which finds three a little faster.
        machine.seconds = lambda: 0.006 * (0.92 if machine.threads == 3 and threads.measurements % 2 else 1.0)
        threads = machine.chooser((2, 3))
        taken = []
        for _ in range(10):
            threads.measure()
            taken.append(threads.number)

        assert taken == [2, *[3] * 9]

    def test_it_stays_with_a_number_that_was_settled(self):
        machine = Machine(free=2)
        threads = machine.chooser()
        threads.measure()

        threads.settle()
        machine.free = 1
        machine.steps(threads, 100)

        assert (threads.number, threads.measurements) == (2, 1)


class TestWhoDecides:
    @pytest.fixture
    def world(self, tmp_path_factory):
        return tiny_world(tmp_path_factory)

    @pytest.fixture
    def four_threads(self, monkeypatch):
        """PyTorch has four threads, and the process as many cores, whatever there is here.

        Set in OpenMP: MKL, once PyTorch has told it a number, keeps to that in steps on other numbers.
        """
        before = torch.get_num_threads()
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(module, "available_cores", lambda: 4)
        monkeypatch.setattr(module, "nobody_else_computes", lambda: False)
        monkeypatch.setattr(
            module, "WEIGHTS", module.WEIGHTS // 4
        )  # how long it takes is nobody's business here
        set_num_threads(4)
        yield
        set_num_threads(before)

    def engine(self, world, **options):
        return LLMEngine.from_engine_args(EngineArgs(model=str(world.base), **OPTIONS, **options))

    def test_a_process_that_set_one_thread_stays_at_one(self, world, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert torch.get_num_threads() == 1

        threads = self.engine(world).runner.cpu_threads

        assert (threads.number, threads.is_open) == (1, False)

    def test_it_is_measured_up_to_what_pytorch_has(self, world, four_threads):
        assert self.engine(world).runner.cpu_threads.candidates == [1, 2, 3, 4]

    def test_what_is_measured_on_before_there_is_a_model_is_given_back(self, world, four_threads):
        config = EngineArgs(model=str(world.base), **OPTIONS).create_engine_config()
        before = live_bytes()

        threads = cpu_threads(config)

        assert threads.measurements == 1
        assert live_bytes() - before < 2**20

    def test_cores_and_quota_are_the_most_it_takes(self, world, four_threads, monkeypatch):
        monkeypatch.setattr(module, "available_cores", lambda: 2)

        assert self.engine(world).runner.cpu_threads.candidates == [1, 2]

    def test_where_nobody_else_computes_the_number_is_left_as_it_is(self, world, four_threads, monkeypatch):
        monkeypatch.setattr(module, "nobody_else_computes", lambda: True)
        engine, set_to = self.engine(world), []
        engine.runner.cpu_threads.apply = set_to.append

        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))
        run(engine)

        assert engine.debug_info()["threads"] == "4 of 4 CPU threads (all are free)"
        assert set_to == []

    @pytest.mark.parametrize(
        ("loadavg", "alone"),
        [("0.17 1.34 2.08 1/345 27\n", True), ("0.17 1.34 2.08 3/345 27\n", False), ("", False)],
    )
    def test_who_else_computes_is_what_the_system_says_runs(self, tmp_path, loadavg, alone):
        (tmp_path / "loadavg").write_text(loadavg)

        assert module.nobody_else_computes(tmp_path / "loadavg") is alone
        assert module.nobody_else_computes(tmp_path / "not there") is False

    def test_omp_num_threads_is_respected(self, world, four_threads, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")

        assert str(self.engine(world).runner.cpu_threads) == "4 CPU threads (OMP_NUM_THREADS)"

    def test_threads_goes_before_everything(self, world, four_threads, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "4")

        assert self.engine(world, threads=3).debug_info()["threads"] == "3 CPU threads (asked for)"

    @pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
    def test_a_number_that_none_can_be_is_refused(self, world, threads):
        with pytest.raises(ValueError, match="threads must be an int of at least 1"):
            EngineArgs(model=str(world.base), threads=threads).create_engine_config()

    def test_the_process_keeps_its_number_and_steps_have_theirs(self, world, four_threads):
        engine, seen = self.engine(world, threads=2), []
        engine.runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))

        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))
        run(engine)

        assert seen == [2, 2, 2]
        assert torch.get_num_threads() == 4

    def test_it_holds_in_whatever_thread_the_engine_is_stepped(self, world, four_threads):
        engine, seen = self.engine(world, threads=2), []
        engine.runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))

        other = threading.Thread(target=run, args=(engine,))
        other.start()
        other.join()

        assert seen == [2, 2, 2]

    def test_a_step_that_fails_gives_the_process_its_number_back(self, world, four_threads):
        engine = self.engine(world, threads=2)
        engine.add_request("r", {"prompt_token_ids": token_ids(5, seed=1)}, greedy(3))
        engine.runner.model.compute_logits = lambda *args: 1 / 0

        with pytest.raises(ZeroDivisionError):
            engine.step()

        assert torch.get_num_threads() == 4

    def test_measured_or_not_the_tokens_are_the_same(self, world, four_threads):
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
        assert not threads.is_open

    def test_a_model_is_read_on_the_number_that_is_fastest_then(self, world, four_threads, monkeypatch):
        """What packs weights fits them to the number of threads that it has."""
        seen, get_model = [], model_runner.get_model
        monkeypatch.setattr(
            model_runner,
            "get_model",
            lambda *a, **k: seen.append(torch.get_num_threads()) or get_model(*a, **k),
        )
        monkeypatch.setattr(module.CPUThreads, "_time", lambda self, number, limit: abs(number - 3))

        self.engine(world)

        assert seen == [3]


class TestCores:
    @pytest.mark.parametrize(
        ("most", "numbers"),
        [
            (1, [1]),
            (2, [1, 2]),
            (4, [1, 2, 3, 4]),
            (5, [1, 2, 3, 4, 5]),
            (20, [1, 2, 3, 4, 6, 8, 12, 16, 20]),
        ],
    )
    def test_numbers_to_try_grow_by_a_third_to_a_half(self, most, numbers):
        assert numbers_up_to(most) == numbers

    @pytest.mark.parametrize(
        ("membership", "files", "quota"),
        [
            ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
            ("0::/\n", {"cpu.max": "max 100000\n"}, float("inf")),
            ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
            ("0::/a\n", {"a/cpu.max": "300000 100000\n", "cpu.max": "50000 100000\n"}, 0.5),
            (
                "3:cpu,cpuacct:/job\n2:memory:/x\n",
                {"cpu/job/cpu.cfs_quota_us": "250000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
                2.5,
            ),
            (
                "3:cpu,cpuacct:/\n",
                {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
                float("inf"),
            ),
            ("", {}, float("inf")),
        ],
    )
    def test_a_control_groups_quota_is_read(self, tmp_path, membership, files, quota):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / name).write_text(text)

        assert cpu_quota(tmp_path / "root", tmp_path / "membership") == quota

    @pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (2.5, 2), (float("inf"), 3), (64.0, 3)])
    def test_a_fraction_of_a_core_is_rounded_down_to_at_least_one(self, monkeypatch, quota, cores):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)

        assert module.available_cores() == cores
