"""A rank that does what rank 0 says.

Stands for `WorkerProc` of vllm/v1/executor/multiproc_executor.py (v0.22.1).
"""

import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from minivllm.config import EngineConfig
from minivllm.errors import message_of
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.parallel.other_ranks import is_of_others
from minivllm.parallel.ranks import MakeRunner, config_of, join_ranks, make_rank_runner
from minivllm.parallel.shared_reading import Assignment, stamp_of
from minivllm.parallel.step_messages import StepMessage, StepReader
from minivllm.processes import receive, send

# Adapters that are read at the same time, beside the steps.
PARALLEL_READS = 2


class Follower:
    """A rank's model and adapters. It decides nothing: rank 0 says which adapter is read, and which slot it is in.

    adapters   number -> an adapter that was read, by the number that rank 0 gave it
    """

    def __init__(self, pipe: Connection, make_runner: MakeRunner) -> None:
        self._pipe = pipe
        self._make_runner = make_runner
        self._reader = StepReader()
        self._pool = ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="minivllm-reader")
        self.adapters: dict[int, Future[LoRAModel]] = {}
        self._assigned: dict[int, Assignment] = {}  # by adapter id

    def serve(self, join: Callable[[], None], config: EngineConfig, rank: int) -> None:
        """Until rank 0 says so, or has ended. What is raised here is reported to it."""
        try:
            join()
            self.runner = make_rank_runner(config_of(rank, config), self._make_runner)
            with self.runner.cpu_threads.in_use():
                self._obey()
        except (EOFError, ConnectionError):
            return  # rank 0 has ended
        except BaseException as error:  # of any kind, because rank 0 waits
            self._tell("failed", (is_of_others(error), message_of(error)))

    def _obey(self) -> None:
        while True:
            name, args = receive(self._pipe)
            if name == "stop":
                return
            getattr(self, name)(*args)

    def _tell(self, name: str, value: Any) -> None:
        send(self._pipe, (name, value))

    # ---- what rank 0 says -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self.runner.warm_up()
        gc.freeze()  # what is there by now stays: to look through it again and again would hold up steps on all ranks

    def launch(
        self, message: StepMessage, assigned: dict[int, Assignment] | None, dropped: list[int], drawn: int
    ) -> None:
        """Run a step.

        assigned   the slots of all adapters that have one, by adapter id; None = as in the step before
        dropped    numbers of adapters that nobody will ask for
        drawn      rows whose tokens rank 0 will share; 0 = the next step needs no others than the likeliest
        """
        if assigned is not None:
            self._assign(assigned)
        for number in dropped:
            self.adapters.pop(number, None)
        self.runner.launch_model(self._reader.read(message))
        if drawn:
            self._share_tokens(drawn)

    @torch.inference_mode()
    def _share_tokens(self, rows: int) -> None:
        """Take what rank 0 has sampled for the first rows of the step launched last; the next step reads it."""
        self.runner.tp.broadcast(self.runner.graphs.output.tokens[:rows])

    def read(self, number: int, lora_request: LoRARequest, stamp: object) -> None:
        """Read an adapter beside the steps, and say whether it could be.   stamp: of its folder, as rank 0 saw it"""
        self.adapters[number] = future = self._pool.submit(self._read, lora_request, stamp)
        future.add_done_callback(partial(self._answer, number))

    def _read(self, lora_request: LoRARequest, stamp: object) -> LoRAModel:
        worker = self.runner.worker_manager
        lora = worker.source.load(lora_request)
        if stamp != stamp_of(lora_request):
            raise ValueError("its files have changed while they were read; load it again")
        worker.manager.stage(lora)
        return lora

    def _answer(self, number: int, future: Future) -> None:
        error = future.exception()
        self._tell("answer", (number, None if error is None else message_of(error)))

    def _assign(self, assigned: dict[int, Assignment]) -> None:
        """Bring the slots into the state that rank 0's are in."""
        manager = self.runner.worker_manager.manager
        for adapter_id in [i for i, old in self._assigned.items() if assigned.get(i) != old]:
            manager.remove_adapter(adapter_id)
        for adapter_id, assignment in assigned.items():
            if self._assigned.get(adapter_id) == assignment:
                continue
            lora = self.adapters[assignment.number].result()
            if assignment.pages:
                # Where there are pages, minivllm.gpu is there.
                from minivllm.gpu.pages.ledger import GivenPages

                manager.pool.ledger.lender = GivenPages(assignment.pages)
            # Rank 0 has decided which slot, and that it is free. The table names the adapter once it is there.
            manager.tiers.memory.put(adapter_id, lora)
            manager.write_slot(lora, assignment.slot)
            manager.tiers.slots.put(adapter_id, assignment.slot)
        self._assigned = assigned


def follow(pipe: Connection) -> None:
    """Do what rank 0 says, until it says no more. Its first message says what makes a runner, too."""
    try:
        make_runner, config, rank, port = receive(pipe)
    except (EOFError, ConnectionError):
        return
    follower = Follower(pipe, make_runner)
    follower._tell("answer", (0, None))
    size = config.parallel_config.tensor_parallel_size

    def join() -> None:
        if port is not None:
            join_ranks(rank, size, config.device, dist.TCPStore("127.0.0.1", port, size, is_master=False))

    follower.serve(join, config, rank)
