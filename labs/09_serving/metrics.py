"""What a monitor reads. Stands for vllm/v1/metrics/loggers.py (v0.22.1), with its names where it has them."""

from labs.kit.overlay import Todo
import time
from collections import deque
from collections.abc import Callable, Iterable

from minivllm.engine.outputs import RequestOutput
from minivllm.server.engine_metrics import AdapterEvents
from minivllm.server.families import Families
from minivllm.server.record import Record

OTHER = "other"
MOST_RECENT = 1000


class ServerMetrics(Families):
    """What one server counts.

    adapter_events   counts what happens to adapters (`AsyncLLM.watch_adapters`)
    recent_ttft   seconds to the first token of the last requests that ended, for the live page
    most_labels   adapters with a label of their own, the first that are seen; all others share `other`

    The base model counts as one of them, under its name. An adapter has its counters, at 0, from when its name is
    served: one that nobody asks for is not forgotten.
    """

    def __init__(self, model_name: str, adapters: Iterable[str] = (), most_labels: int = 200) -> None:
        super().__init__(model_name)
        self.most_labels = most_labels
        self._labels: set[str] = set()
        self.adapter_events = AdapterEvents(self.events, self.label)
        self.recent_ttft: deque[float] = deque(maxlen=MOST_RECENT)
        for name in (model_name, *adapters):
            self.serve(name)

    # region lab 9.5: labels and counts
    def label(self, name: str) -> str:
        """The label of an adapter: its own, or `other` once there are `most_labels`. A label is never given back."""
        raise Todo("lab 9.5: labels and counts")

    def serve(self, name: str) -> None:
        """Begin the counters of an adapter, at 0, and `adapter_ttft`; all under its label.

        They are requests, read, written, waits and all of `events`.
        """
        raise Todo("lab 9.5: labels and counts")

    def tokens(self, adapter: str, count: int, seconds: float | None) -> None:
        """So many tokens of a request came at once: `generation_tokens` of the server, `written` of its adapter.

        seconds   from one to the next, for each of them in `itl`; None where nobody has seen that
        """
        raise Todo("lab 9.5: labels and counts")

    def finished(self, adapter: str, output: RequestOutput) -> None:
        """A request has had its last output.

        Each answer is `ended` by its finish_reason; the prompt's tokens are counted once, also as `read` of the
        adapter. Where there are `output.metrics`: steps of waiting for a slot (`waits`), and seconds from arrival to
        the first token (`ttft`, `recent_ttft`, `adapter_ttft`), first step (`queued`) and end (`e2e`), if it has come.
        """
        raise Todo("lab 9.5: labels and counts")

    # endregion

    def begun(self, adapter: str) -> None:
        """The engine has taken a request of it."""
        self.requests.labels(self.label(adapter)).inc()

    def aborted(self) -> None:
        """A request ended without a last output, since the engine did."""
        self.ended.labels(self.model_name, "abort").inc()


class Progress:
    """Tells metrics and record of one request of the engine, output by output.

    model        as the client calls it
    last_at      when the last tokens were seen, on `clock`
    num_tokens   of all its answers so far
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        record: Record,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics, self.record, self.model, self.clock = metrics, record, model, clock
        self.last_at: float | None = None
        self.num_tokens = 0
        self.begun = self.finished = False

    # region lab 9.5: what one request adds
    def observe(self, output: RequestOutput, all_are_seen: bool) -> None:
        """To be called with each output that somebody is given. It may stand for several steps.

        all_are_seen   whether the time between two outputs is that between their tokens; else there is none to tell

        The first one counts the request (`ServerMetrics.begun`) and its prompt's tokens in the record. Of the tokens
        that are new in any of its n answers, metrics (`ServerMetrics.tokens`) and record hear; one answer has
        a share of them, and the seconds since `last_at` go into as many tokens of it. The record also notes when the
        first token came (`Record.note_first_token`). The last one is `finished`.
        """
        raise Todo("lab 9.5: what one request adds")

    def end(self) -> None:
        """Nobody will be given more of it. One that began and did not finish was `aborted`."""
        raise Todo("lab 9.5: what one request adds")

    # endregion
