"""An engine under random requests and random adapters for as long as one likes.

    python tests/engine/soak.py --requests 2000 --seed 0

Requests arrive, are aborted, name adapters that are bad or turn bad; adapters are pinned, reloaded with other
weights, unloaded, loaded ahead. Between any two calls the engine is looked over (oracles/invariants.py); every token of
every greedy request must be the likeliest one of transformers + PEFT alone on that request, with the weights
that were in memory when the token was computed; and those must be the weights that the request was owed.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from soak_disk import VARIANTS, AdapterDisk, VersionedOracle
from soak_round import NUM_ADAPTERS, Report, Round

REQUESTS_A_ROUND = 100


def run_soak(
    num_requests: int, seed: int = 0, progress: Callable[[int, Report], None] | None = None
) -> Report:
    """Serve so many random requests; AssertionError tells what went wrong, and in which round.

    progress: called after each round with the requests served so far
    """
    report, started, served = Report(), time.monotonic(), 0
    while served < num_requests:
        rng = random.Random(f"{seed}/{report.rounds}")
        count = min(REQUESTS_A_ROUND, num_requests - served)
        with tempfile.TemporaryDirectory() as folder:
            disk = AdapterDisk(Path(folder), VARIANTS[report.rounds % len(VARIANTS)], NUM_ADAPTERS)
            try:
                Round(disk, VersionedOracle(disk), rng, report).run(count)
            except Exception as error:
                raise AssertionError(
                    f"seed {seed}, round {report.rounds}, step {report.steps}: {error}"
                ) from error
        report.rounds += 1
        served += count
        report.seconds = time.monotonic() - started
        if progress is not None:
            progress(served, report)
    report.counts["requests"] = served
    return report


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    report = run_soak(
        args.requests,
        args.seed,
        lambda served, report: print(f"{served}/{args.requests} requests, {report}", flush=True),
    )
    print(f"ok: {report}")


if __name__ == "__main__":
    main()
