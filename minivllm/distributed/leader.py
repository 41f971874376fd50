"""The model runner of the rank that schedules. Stands for `MultiprocExecutor` of
vllm/v1/executor/multiproc_executor.py (v0.22.1), whose first rank is a process like the others.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.distributed.other_ranks import OtherRanks, wait_for_ends
from minivllm.distributed.rank_runner import RankRunner, config_of, join_ranks, leave_ranks
from minivllm.distributed.shared_reading import SharedReading
from minivllm.distributed.step_messages import StepWriter
from minivllm.distributed.torchrun import is_by_torchrun, meet_others
from minivllm.guards.turns import no_interrupts
from minivllm.worker.mixed_graphs import MixedGraphs
from minivllm.worker.row_sampler import PendingStep, Sampled, all_take_likeliest


class LeadingRunner(RankRunner):
    """A runner for one engine, whose steps all ranks run.

    The others get each step once its adapters are in slots here, before it is computed. They have all logits, too, and
    so the likeliest tokens, for a step ahead. Everything else is sampled here. Where an engine runs ahead, all get it
    by one broadcast behind the step: to draw on every rank would be dozens of launches on each.

    EngineDeadError from any call, once a rank has ended.
    """

    def __init__(self, config: EngineConfig, others: OtherRanks) -> None:
        self.others = others
        self._reading: SharedReading | None = None
        self._writer = StepWriter()
        self._untold: SchedulerOutput | None = None
        self._unshared = 0  # rows whose tokens the others wait for, behind the step launched last
        self._captured: list[dict] = []  # the graphs, which have to go before the ranks' group can
        self._end = weakref.finalize(self, end_ranks, others, self._captured)
        with others.in_step(lambda: False):
            super().__init__(config_of(0, config))
        others.on_death.append(self._group.release)

    def load_lora_model(self, model: nn.Module, vllm_config: EngineConfig, device: str) -> nn.Module:
        model = super().load_lora_model(model, vllm_config, device)
        self._reading = SharedReading(self.lora_manager, self.others)
        return model

    def warm_up(self) -> None:
        self.others.tell("warm_up")
        try:
            with self.others.in_step(lambda: False):
                super().warm_up()
            graphs = [graphs for graphs in (self.decode_graphs, self.mixed_graphs) if graphs is not None]
            self._captured += [graphs._steps for graphs in graphs]
        except BaseException:
            self._end()
            raise

    def use_mixed_graphs(self, graphs: MixedGraphs) -> None:
        self.mixed_graphs = graphs  # `launch_model` asks for them

    @torch.inference_mode()
    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        self.others.check()
        self._share()  # of a step that broke off before its tokens were left
        self._untold = output
        # A Ctrl-C in the middle would leave the others waiting for the rest.
        with no_interrupts(), self.others.in_step(lambda: self._untold is None):
            if self._reading is None:
                self._tell()
            return self._launch_graph_or_model(output)

    def set_active_loras(self, *args: Any, **options: Any) -> None:
        super().set_active_loras(*args, **options)
        self._tell()

    def _tell(self) -> None:
        """Have the others run the step; again in the same step, nothing."""
        output, self._untold = self._untold, None
        if output is not None:
            seats, dropped = (None, []) if self._reading is None else self._reading.news()
            drawn = self._rows_to_share(output)
            self.others.tell("launch", self._writer.write(output), seats, dropped, drawn)
            self._unshared = drawn

    def _rows_to_share(self, output: SchedulerOutput) -> int:
        """All that sample, if the others will not find all their tokens; 0 if they will, or the next step waits."""
        if not (self.config.scheduler_config.async_scheduling and self.can_run_ahead):
            return 0
        sampling = [entry.request for entry in output.scheduled if entry.samples]
        is_found = self.takes_stand_ins(output) and all_take_likeliest(sampling)
        return 0 if is_found else len(sampling)

    def _share(self) -> None:
        """Do what the others wait for, once."""
        if self._unshared:
            with no_interrupts(), self.others.in_step(lambda: True):
                rows, self._unshared = self._unshared, 0
                self.share_tokens(rows)

    def sample_tokens(self, step: PendingStep) -> Sampled:
        self._share()
        sampled = super().sample_tokens(step)
        self.others.check()  # a GPU's waiting for a rank that has ended is cut short, and leaves anything
        return sampled

    def leave_tokens(self, step: PendingStep) -> Callable[[], Sampled] | None:
        """As in the parent class; the others get what they cannot find."""
        wait = super().leave_tokens(step)
        self._share()
        return wait and partial(self._wait, wait)

    def _wait(self, wait: Callable[[], Sampled]) -> Sampled:
        sampled = wait()
        self.others.check()
        return sampled


def start_ranks(config: EngineConfig) -> LeadingRunner:
    """A runner for all ranks, which are started here and end with it. Errors as of `ModelRunner`.

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
        return lead(config, meet_others(size, config.device))
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    return lead(config, OtherRanks.start(size - 1), store)


def lead(config: EngineConfig, others: OtherRanks, store: dist.TCPStore | None = None) -> LeadingRunner:
    """store: where they meet; None = they have met"""
    size = config.parallel_config.tensor_parallel_size
    try:
        others.begin([(config, rank, store and store.port) for rank in range(1, size)])
        if store is not None:
            join_ranks(0, size, config.device, store)
        others.on_death.append(leave_ranks)
        return LeadingRunner(config, others)
    except BaseException:
        end_ranks(others)
        raise


def end_ranks(others: OtherRanks, captured: Sequence[dict] = ()) -> None:
    """captured: the steps that are CUDA graphs, which nobody runs any more"""
    others.close()
    for steps in captured:
        steps.clear()
    leave_ranks()
