"""What is counted of requests (lab 9.5). The oracle: sums by hand, read as Prometheus reads them."""

import random

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minivllm.engine.metrics import RequestMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.server.access_log import Record
from minivllm.server.metrics import OTHER, Progress, ServerMetrics

pytestmark = pytest.mark.lab("9.5")

SERVER = {"model_name": "base"}


class Seen:
    """The numbers of a server as a monitor sees them."""

    def __init__(self, metrics):
        text = generate_latest(metrics.registry).decode()
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def of(self, name, **labels):
        """0 for what is not there"""
        return self.samples.get((name, tuple(sorted(labels.items()))), 0)

    def of_adapter(self, name, adapter):
        return self.samples[f"minivllm:adapter_{name}", (("adapter", adapter),)]

    def ends(self, *reasons):
        """How many requests ended for each reason."""
        return [self.of("vllm:request_success_total", finished_reason=r, **SERVER) for r in reasons]

    def adapters(self):
        return {value for _, labels in self.samples for key, value in labels if key == "adapter"}


def output(*lengths, finished=False, reasons=(), times=None, prompt=3):
    """An output of as many answers with so many tokens each so far."""
    answers = [
        CompletionOutput(i, "", list(range(length)), finish_reason=dict(enumerate(reasons)).get(i))
        for i, length in enumerate(lengths)
    ]
    return RequestOutput("r", None, [1] * prompt, answers, finished=finished, metrics=times)


class TestALabel:
    def test_is_an_adapters_own_until_there_are_the_most(self):
        metrics = ServerMetrics("base", ["a", "b"], most_labels=4)

        labels = [metrics.label(name) for name in ("c", "a", "d", "e", "c", "base", "d")]

        assert labels == ["c", "a", OTHER, OTHER, "c", "base", OTHER]

    def test_is_shared_by_however_many_come(self):
        metrics = ServerMetrics("base", most_labels=3)

        for i in range(100):
            metrics.serve(f"a{i}")
            metrics.begun(f"a{i}")

        seen = Seen(metrics)
        assert seen.adapters() == {"base", "a0", "a1", OTHER}
        assert [seen.of_adapter("requests_total", name) for name in ("a0", "a1", OTHER)] == [1, 1, 98]


class TestAnAdapterThatIsServed:
    @pytest.mark.parametrize(
        "name",
        [
            *("requests_total", "prompt_tokens_total", "generation_tokens_total", "slot_wait_steps_total"),
            *("loads_total", "activations_total", "evictions_total", "drops_total"),
            "time_to_first_token_seconds_count",
        ],
    )
    def test_is_at_zero_before_anybody_asks_for_it(self, name):
        metrics = ServerMetrics("base", ["idle"])
        metrics.serve("later")

        seen = Seen(metrics)

        assert [seen.of_adapter(name, adapter) for adapter in ("base", "idle", "later")] == [0, 0, 0]

    def test_again_keeps_what_was_counted(self):
        metrics = ServerMetrics("base", ["sql"])
        metrics.begun("sql")

        metrics.serve("sql")

        assert Seen(metrics).of_adapter("requests_total", "sql") == 1

    def test_beyond_the_most_begins_the_shared_ones(self):
        metrics = ServerMetrics("base", ["sql"], most_labels=2)

        metrics.serve("dates")

        assert Seen(metrics).of_adapter("evictions_total", OTHER) == 0
        assert Seen(metrics).adapters() == {"base", "sql", OTHER}


class TestTokens:
    def test_count_for_the_server_and_for_their_adapter(self):
        metrics = ServerMetrics("base", ["sql", "dates"], most_labels=3)

        metrics.tokens("sql", 3, None)
        metrics.tokens("sql", 4, 0.5)
        metrics.tokens("base", 2, 0.25)
        metrics.tokens("beyond", 2, 0.0)  # no time is a latency, too
        metrics.tokens("the most", 3, None)

        seen = Seen(metrics)
        assert seen.of("vllm:generation_tokens_total", **SERVER) == 14
        written = [
            seen.of_adapter("generation_tokens_total", name) for name in ("sql", "dates", "base", OTHER)
        ]
        assert written == [7, 0, 2, 5]
        assert seen.of("vllm:inter_token_latency_seconds_count", **SERVER) == 8
        assert seen.of("vllm:inter_token_latency_seconds_sum", **SERVER) == 4 * 0.5 + 2 * 0.25


TIMES = {"arrival_time": 100.0, "first_scheduled_time": 100.25, "first_token_time": 102.0}
HISTOGRAMS = ("time_to_first_token", "request_queue_time", "e2e_request_latency")


def sums(seen):
    return [seen.of(f"vllm:{name}_seconds_sum", **SERVER) for name in HISTOGRAMS]


def counts(seen):
    return [seen.of(f"vllm:{name}_seconds_count", **SERVER) for name in HISTOGRAMS]


class TestARequestThatFinished:
    def test_counts_its_times_from_its_arrival(self):
        metrics = ServerMetrics("base", ["sql"])
        times = RequestMetrics(**TIMES, finished_time=107.5, lora_wait_steps=4)

        metrics.finished("sql", output(5, finished=True, reasons=["stop"], times=times, prompt=9))

        seen = Seen(metrics)
        assert sums(seen) == [2.0, 0.25, 7.5] and counts(seen) == [1, 1, 1]
        assert list(metrics.recent_ttft) == [2.0]
        assert seen.of_adapter("time_to_first_token_seconds_sum", "sql") == 2.0
        assert seen.of_adapter("time_to_first_token_seconds_count", "sql") == 1
        assert seen.of_adapter("slot_wait_steps_total", "sql") == 4
        assert seen.of_adapter("time_to_first_token_seconds_count", "base") == 0

    def test_counts_its_prompt_once_and_each_answer_by_its_end(self):
        metrics = ServerMetrics("base", ["sql"])

        metrics.finished("sql", output(5, 2, 4, finished=True, reasons=["stop", "length", "stop"], prompt=9))

        seen = Seen(metrics)
        assert seen.of("vllm:prompt_tokens_total", **SERVER) == 9
        assert seen.of_adapter("prompt_tokens_total", "sql") == 9
        metrics.finished("base", output(1, finished=True))  # without a reason: aborted
        assert Seen(metrics).ends("stop", "length", "abort") == [2, 1, 1]

    @pytest.mark.parametrize(
        ("times", "expected"),
        [
            pytest.param(None, [None, None, None], id="refused"),
            pytest.param({"arrival_time": 100.0}, [None, None, None], id="while it waited"),
            pytest.param(
                {"arrival_time": 100.0, "first_scheduled_time": 100.25}, [None, 0.25, None], id="unanswered"
            ),
            pytest.param(TIMES, [2.0, 0.25, None], id="not finished"),
            # Its end is no first token.
            pytest.param(
                {"arrival_time": 100.0, "finished_time": 103.0}, [None, None, 3.0], id="without a token"
            ),
            pytest.param(dict.fromkeys([*TIMES, "finished_time"], 0.0), [0, 0, 0], id="all at once, at zero"),
        ],
    )
    def test_counts_only_what_it_came_to(self, times, expected):
        metrics = ServerMetrics("base")
        made = times and RequestMetrics(**times)

        metrics.finished("base", output(0, finished=True, reasons=["error"], times=made))

        seen = Seen(metrics)
        assert counts(seen) == [time is not None for time in expected]
        assert sums(seen) == [time or 0 for time in expected]
        firsts = int(expected[0] is not None)
        assert len(metrics.recent_ttft) == firsts
        assert seen.of_adapter("time_to_first_token_seconds_count", "base") == firsts

    def test_of_an_adapter_beyond_the_most_counts_for_the_others(self):
        metrics = ServerMetrics("base", most_labels=1)
        times = RequestMetrics(**TIMES, lora_wait_steps=2)

        metrics.finished("sql", output(5, finished=True, reasons=["stop"], times=times, prompt=9))

        seen = Seen(metrics)
        assert seen.adapters() == {"base", OTHER}
        assert seen.of_adapter("prompt_tokens_total", OTHER) == 9
        assert seen.of_adapter("slot_wait_steps_total", OTHER) == 2
        assert seen.of_adapter("time_to_first_token_seconds_count", OTHER) == 1


class Watched:
    """One request's progress on a clock that is set by hand."""

    def __init__(self, model="sql", now=50.0):
        self.now = now
        self.metrics = ServerMetrics("base", ["sql"])
        self.record = Record(started=49.0)
        self.progress = Progress(self.metrics, self.record, model, clock=lambda: self.now)

    def observe(self, after, *lengths, all_are_seen=True, **options):
        self.now += after
        self.progress.observe(output(*lengths, **options), all_are_seen)

    def latency(self):
        """(how many, their sum)"""
        seen = Seen(self.metrics)
        name = "vllm:inter_token_latency_seconds"
        return seen.of(f"{name}_count", **SERVER), seen.of(f"{name}_sum", **SERVER)


class TestProgress:
    def test_counts_every_token_once_however_they_come(self):
        watched = Watched()

        for length in (1, 2, 5, 5, 9):
            watched.observe(1, length)

        seen = Seen(watched.metrics)
        assert seen.of_adapter("generation_tokens_total", "sql") == 9
        assert watched.record.completion_tokens == 9
        assert seen.of_adapter("requests_total", "sql") == 1
        assert watched.record.prompt_tokens == 3

    @pytest.mark.parametrize(
        ("now", "observed", "expected"),
        [
            # A slow consumer is given four tokens at once; each took a fourth of the time.
            pytest.param(50, [(3, 1), (2, 5), (0.25, 6)], (5, 4 * 0.5 + 0.25), id="merged tokens"),
            pytest.param(50, [(1, 1), (0, 3)], (2, 0), id="tokens that came at one moment"),
            pytest.param(50, [(3, 4)], (0, 0), id="the first tokens, with no time between"),
            # Two answers, a token each every half second: that is the time between two tokens, not half of it.
            pytest.param(
                50, [(1, 1, 1), (0.5, 2, 2), (1, 4, 4)], (6, 2 * 0.5 + 4 * 0.5), id="several answers"
            ),
            pytest.param(50, [(1, 1), (2, 1), (1, 2)], (1, 3), id="no new tokens: the time runs on"),
            # Where a clock begins is nobody's business, and None is the only time that is none.
            pytest.param(0, [(0, 1), (1.5, 2)], (1, 1.5), id="from when the clock is at zero"),
        ],
    )
    def test_shares_the_time_between_outputs_among_their_tokens(self, now, observed, expected):
        watched = Watched(now=float(now))

        for after, *lengths in observed:
            watched.observe(after, *lengths)

        assert watched.latency() == expected

    def test_of_outputs_that_were_not_seen_has_no_time_between(self):
        watched = Watched()

        watched.observe(3, 4, all_are_seen=False)
        watched.observe(3, 8, all_are_seen=False)

        assert watched.latency() == (0, 0)
        assert watched.record.completion_tokens == 8

    @pytest.mark.parametrize(("told", "expected"), [(50.5, 50.5), (None, 52.0)], ids=["told", "seen"])
    def test_notes_when_the_first_token_came_or_was_seen_where_the_engine_tells_no_times(
        self, told, expected
    ):
        watched = Watched()
        times = [told and RequestMetrics(49.5, first_token_time=told + later) for later in (0, 1.5)]

        watched.observe(1, 0)
        assert watched.record.first_token_at is None
        watched.observe(1, 2, times=times[0])
        watched.observe(1, 3, times=times[1])

        assert watched.record.first_token_at == expected

    def test_of_several_prompts_adds_up_in_the_record_of_all(self):
        watched = Watched()
        another = Progress(watched.metrics, watched.record, "sql", clock=lambda: watched.now)

        watched.observe(1, 1, prompt=3)
        another.observe(output(2, prompt=5), True)

        assert (watched.record.prompt_tokens, watched.record.completion_tokens) == (8, 3)

    def test_to_the_end_counts_the_request_as_finished_and_not_as_aborted(self):
        watched = Watched()

        watched.observe(1, 1)
        watched.observe(1, 2, finished=True, reasons=["length"])
        watched.progress.end()

        seen = Seen(watched.metrics)
        assert seen.ends("length", "abort") == [1, 0]
        assert seen.of_adapter("prompt_tokens_total", "sql") == 3

    def test_that_breaks_off_counts_an_abort(self):
        watched = Watched()

        watched.observe(1, 1)
        watched.progress.end()

        seen = Seen(watched.metrics)
        assert seen.ends("abort") == [1]
        assert seen.of_adapter("prompt_tokens_total", "sql") == 0

    def test_that_never_began_counts_nothing(self):
        """The engine refused it: it is no request that ended."""
        watched = Watched()

        watched.progress.end()

        assert Seen(watched.metrics).ends("abort") == [0]
        assert Seen(watched.metrics).of_adapter("requests_total", "sql") == 0

    @pytest.mark.parametrize("seed", range(5))
    def test_of_any_history_adds_up(self, seed):
        """Time and tokens from the first output with tokens to the last: none is lost, whatever was merged."""
        rng, watched = random.Random(seed), Watched()
        n, lengths = rng.randint(1, 3), [0] * 3
        started = first = last = None
        for _ in range(12):
            step = rng.choice([0, 0, 1, 3])
            lengths = [length + step for length in lengths]
            watched.observe(rng.choice([0.25, 0.5, 2]), *lengths[:n])
            if step:
                started, first = (watched.now, step) if started is None else (started, first)
                last = watched.now

        tokens = lengths[0] - (first or 0)
        count, total = watched.latency()
        assert count == n * tokens
        assert total == pytest.approx(0 if started is None else n * (last - started))
