"""The rank that schedules has all ranks run each step. Stands for `MultiprocExecutor` of
vllm/v1/executor/multiproc_executor.py (v0.22.1), whose first rank is a process like the others.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.lora.loading import AdapterSource
from minivllm.parallel.other_ranks import OtherRanks, wait_for_ends
from minivllm.parallel.ranks import MakeRunner, config_of, join_ranks, leave_ranks, make_rank_runner
from minivllm.parallel.shared_reading import SharedSource
from minivllm.parallel.step_messages import StepWriter
from minivllm.parallel.torchrun import is_by_torchrun, meet_others
from minivllm.worker.model_runner import Executor
from minivllm.worker.row_sampler import PendingStep, Sampled, all_take_likeliest


class LeadingExecutor(Executor):
    """Runs each step on this rank and on all others.

    The others get a step once its adapters are in slots here, before it is computed. They have all logits, too, and
    so the likeliest tokens, for a step ahead. Everything else is sampled here. Where an engine runs ahead, all ranks
    get the sampled tokens by one broadcast behind the step: to draw on every rank would be dozens of launches on each.

    EngineDeadError from any call, once a rank has ended.
    """

    error = property(attrgetter("others.error"))

    def __init__(self, config: EngineConfig, others: OtherRanks, make_runner: MakeRunner) -> None:
        self.others = others
        self._writer = StepWriter()
        self._unsent: SchedulerOutput | None = None  # the step that the others have not been given
        self._unshared = 0  # rows whose tokens the others wait for, behind the step launched last
        self._captured: list[dict] = []  # the graphs, which have to go before the ranks' group can
        self.shutdown = weakref.finalize(self, end_ranks, others, self._captured)
        with others.in_step(lambda: False):
            runner = make_rank_runner(config_of(0, config), make_runner, self._send)
        super().__init__(runner)
        others.on_death.append(runner.tp.release)
        self._reading: SharedSource | None = None
        if runner.worker_manager is not None:
            runner.worker_manager.read_through(self._shared_source)

    def _shared_source(self, source: AdapterSource) -> SharedSource:
        self._reading = SharedSource(source, self.others)
        return self._reading

    def warm_up(self) -> None:
        self.others.tell("warm_up")
        try:
            with self.others.in_step(lambda: False):
                super().warm_up()
            self._captured += self.runner.graphs.captured
        except BaseException:
            self.shutdown()
            raise

    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        self.others.check()
        self._unsent = output
        with self.others.in_step(lambda: self._unsent is None):
            return super().launch_model(output)

    def _send(self) -> None:
        """Have the others run the step; at other times, as in a dummy run, nothing."""
        output, self._unsent = self._unsent, None
        if output is not None:
            slots, dropped = (None, []) if self._reading is None else self._reading.changes()
            drawn = self._rows_to_share(output)
            self.others.tell("launch", self._writer.write(output), slots, dropped, drawn)
            self._unshared = drawn

    def _rows_to_share(self, output: SchedulerOutput) -> int:
        """All that sample, if the others will not find all their tokens; 0 if they will, or the next step waits."""
        graphs = self.runner.graphs
        if not (self.runner.config.scheduler_config.async_scheduling and graphs.hold_most_steps):
            return 0
        sampling = [entry.request for entry in output.scheduled if entry.samples]
        is_found = graphs.find(output) is not None and all_take_likeliest(sampling)
        return 0 if is_found else len(sampling)

    @torch.inference_mode()
    def share_tokens(self) -> None:
        """Do what the others wait for, once."""
        if self._unshared:
            with self.others.in_step(lambda: True):
                rows, self._unshared = self._unshared, 0
                self.runner.tp.broadcast(self.runner.graphs.output.tokens[:rows])

    def sample_tokens(self, step: PendingStep) -> Sampled:
        self.share_tokens()
        sampled = super().sample_tokens(step)
        self.others.check()  # a GPU's waiting for a rank that has ended is cut short, and leaves anything
        return sampled

    def on_death(self, listener: Callable[[Callable[[], None]], object]) -> None:
        self.others.on_death.append(lambda: listener(self.others.check))


def start_ranks(config: EngineConfig, make_runner: MakeRunner, tokenizer: Any = None) -> LeadingExecutor:
    """An executor for all ranks, which are started here and end with it. Errors as of `ModelRunner`.

    tokenizer   of this rank's runner, and no other's: it samples for all

    Where torchrun has started them, those but rank 0 do not return: they follow, and then exit.
    """
    size = config.parallel_config.tensor_parallel_size
    wait_for_ends()
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a group of torch.distributed already, perhaps of another engine with "
            "tensor_parallel_size; shut that engine down, or start this one in another process"
        )
    if is_by_torchrun():
        return lead(config, meet_others(size, config.device), make_runner, tokenizer)
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    return lead(config, OtherRanks.start(size - 1), make_runner, tokenizer, store)


def lead(
    config: EngineConfig,
    others: OtherRanks,
    make_runner: MakeRunner,
    tokenizer: Any,
    store: dist.TCPStore | None = None,
) -> LeadingExecutor:
    """store: where they meet; None = they have met.   tokenizer: as of `start_ranks`"""
    size = config.parallel_config.tensor_parallel_size
    try:
        others.begin([(make_runner, config, rank, store and store.port) for rank in range(1, size)])
        if store is not None:
            join_ranks(0, size, config.device, store)
        others.on_death.append(leave_ranks)
        return LeadingExecutor(config, others, partial(make_runner, tokenizer=tokenizer))
    except BaseException:
        end_ranks(others)
        raise


def end_ranks(others: OtherRanks, captured: Sequence[dict] = ()) -> None:
    """captured: the steps that are CUDA graphs, which nobody runs any more"""
    others.close()
    for steps in captured:
        steps.clear()
    leave_ranks()
