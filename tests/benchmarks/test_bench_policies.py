"""All policies on all traffics: each is tried, and the committed table has each."""

import json

from benchmarks import policies
from benchmarks.report import RESULTS
from minivllm.policies import keeping, prefetching, routing, scheduling

FAMILIES = {
    "eviction_policy": keeping,
    "prefetch": prefetching,
    "scheduling_policy": scheduling,
    "routing": routing,
}


def test_every_policy_meets_every_traffic():
    tried = {
        (traffic, option, name) for traffic, _, names in policies.cases() for option, name in names.items()
    }

    assert tried == {
        (traffic, option, name)
        for traffic in policies.TRAFFICS
        for option, family in FAMILIES.items()
        for name in family.POLICIES
    }


def test_a_table_has_a_row_for_each_policy_and_what_was_simulated():
    rows = json.loads((RESULTS / "policies-2026-11-23.json").read_text())["rows"]

    lines = policies.table(rows, 1, "eviction_policy", "ttft_p99_ms").splitlines()

    assert [line.split("|")[1].strip() for line in lines[2:]] == list(keeping.POLICIES)
    (bursts,) = (
        row
        for row in rows
        if row["traffic"] == "bursts" and {**row, **policies.DEFAULTS} == row and row["replicas"] == 1
    )
    assert lines[2].split("|")[3].strip() == f"{bursts['ttft_p99_ms']:,.0f}"
