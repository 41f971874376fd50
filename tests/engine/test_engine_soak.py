"""300 random requests against an engine whose adapters change under it; `make soak` does 2,000."""

from soak import run_soak


def test_nothing_is_lost_leaked_or_answered_wrongly():
    report = run_soak(300, seed=0)

    assert report.counts["requests"] == 300
    assert report.counts["tokens verified"] > 1000
    # Without these it would have been no soak.
    for happened in (
        *("finished: abort", "finished: error", "finished: stop", "chunks", "mixed steps", "skips"),
        *("preemptions", "prefix hits", "evictions", "cpu evictions", "reloads", "unloads", "pins"),
        *("refused", "nonsense"),
    ):
        assert report.counts[happened] > 3, f"{happened}: {report.counts[happened]}"
