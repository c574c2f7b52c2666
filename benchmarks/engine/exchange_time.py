"""How long does the exchange of a step take, and how many collectives is it?

    OMP_NUM_THREADS=1 python -m benchmarks.engine.exchange_time [--ranks 1 2 4] [--steps 500]

One JSON row per number of ranks: `ranks`, `p50_us` and `p99_us` of rank 0's time in `gather_rows`, and
`collectives` a step. Ranks are processes of this machine over gloo's loopback; one rank asks nobody.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from tests.support.ranks import CollectiveCount, Rank, run_ranks
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import Exchange, LocalExchange, rank_row

WARM_UP_STEPS = 20


def measure_exchange(ranks: int, steps: int) -> dict[str, float | int]:
    """The row of a number of ranks; raises RuntimeError if a rank fails."""
    if ranks == 1:
        return {"ranks": ranks, **time_steps(LocalExchange(), steps)}
    outcomes = run_ranks(time_group, ranks, steps, deadline_s=120.0)
    for outcome in outcomes:
        if not outcome.returned:
            raise RuntimeError(f"rank {outcome.rank} failed: {outcome.error!r} {outcome.dump}")
    return {"ranks": ranks, **outcomes[0].value}


def time_group(rank: Rank, steps: int) -> dict[str, float | int]:
    """What one rank of a group measures."""
    return time_steps(rank.exchange(), steps)


def time_steps(exchange: Exchange, steps: int) -> dict[str, float | int]:
    """Times of `gather_rows`, and the collectives of one more call."""
    row = rank_row(dummy_plan(prefill_tokens=0, decode_rows=8))
    times_us = np.empty(WARM_UP_STEPS + steps)
    for step in range(len(times_us)):
        start = time.perf_counter()
        exchange.gather_rows(row._replace(seq=step))
        times_us[step] = (time.perf_counter() - start) * 1e6
    with CollectiveCount() as count:
        exchange.gather_rows(row._replace(seq=len(times_us)))
    p50, p99 = np.percentile(times_us[WARM_UP_STEPS:], [50, 99])
    return {
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "collectives": count.collectives,
    }


def main() -> None:
    """Print one row per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    for ranks in options.ranks:
        print(json.dumps(measure_exchange(ranks, options.steps)), flush=True)


if __name__ == "__main__":
    main()
