"""What watches an engine: its recorder, its history and its reports."""

import logging

from minivllm.config import SchedulerConfig
from minivllm.core.scheduler import SchedulingPolicy, first_come_first_served
from minivllm.engine.core import EngineCore
from minivllm.observe import reports
from minivllm.observe.event_log import EventLog
from minivllm.observe.history import History
from minivllm.observe.recorder import Recorder, WatchedLine
from minivllm.observe.trace import Trace
from minivllm.parts import GetAdapter, Observer, Parts

logger = logging.getLogger(__name__)


class EngineObserver(Observer):
    """Records every step, and answers with all counters. What the engine is made of is logged once (INFO)."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._recorder, self._history = Recorder(core), History(core)
        core.listeners += [self._recorder, self._history]
        if core.adapters is not None:
            core.adapters.manager.listeners.append(self._history.hear)
        for sentence in reports.what_it_is(core):
            logger.info(sentence)

    @property
    def trace(self) -> Trace:
        return self._recorder.trace

    def get_metrics(self) -> dict[str, object]:
        return reports.get_metrics(self.core)

    def debug_info(self) -> dict[str, object]:
        return reports.debug_info(self.core, self._history)


def add_to(parts: Parts) -> None:
    """A log of adapters, an observer of steps, and a plain order that notes how far down the line a step came."""
    make_policy = parts.make_policy

    def make_watched(config: SchedulerConfig, get_adapter: GetAdapter) -> SchedulingPolicy:
        policy = make_policy(config, get_adapter)
        return WatchedLine() if policy is first_come_first_served else policy

    parts.make_policy, parts.make_observer = make_watched, EngineObserver
    parts.make_listeners.append(EventLog)
