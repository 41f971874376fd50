"""The benchmark of the server on a tiny shape: it counts every token on both ways, and writes what it found."""

import json

from benchmarks import server


def test_both_ways_answer_the_same_tokens_and_are_compared(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        server, "summary", lambda tokens, seconds, ttft, cpu: counted.append((tokens, len(ttft))) or SUMMARY
    )
    monkeypatch.setattr(server, "avoid_pauses", lambda: None)  # this process does more than serve
    path = tmp_path / "server.json"

    work = ["--model", "tiny", "--streams", "3", "--adapters", "2", "--rank", "4", "--prompt-tokens", "8"]
    server.main([*work, "--output-tokens", "5", "--rounds", "1", "--device", "cpu", "--json", str(path)])

    assert counted == [(15, 3)] * 4
    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["engine", "server", "medians"]
    assert rows[-1]["share"] == 1.0


SUMMARY = {"tokens_per_second": 10.0, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "cpu_us_per_token": 3.0}
