"""Do all ranks enter the same collectives at the same sizes, step after step?"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.steps import (
    EarlyReturn,
    LocalSearch,
    SmallestForIdle,
    kinds_of_step,
    run_steps,
)
from tests.support.ranks import CollectiveCount, Outcome, run_ranks
from tests.support.shapes import PLAIN, NoGraph, Recorded
from tokamak.core.plan import Mode
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import COLUMNS, NO_DEMAND, LocalExchange
from tokamak.runner.shape import ForwardMode, RunningTable

STEPS = 300


def assert_agreed(outcomes: list[Outcome], steps: int) -> None:
    """Ledgers are one line by line, every rank came to its end, and each step made one exchange."""
    first = outcomes[0].ledger
    for other in outcomes[1:]:
        for at, (ours, theirs) in enumerate(zip(first, other.ledger, strict=False)):
            assert ours == theirs, f"line {at} of rank {other.rank} differs from rank 0's"
    for outcome in outcomes:
        assert outcome.returned, f"rank {outcome.rank}: {outcome.error!r}\n{outcome.dump}"
        assert len(outcome.ledger) == len(first)
    exchange = f"dp allgather {[len(COLUMNS)] * len(outcomes)}"
    assert Counter(first)[exchange] == steps


@pytest.mark.parametrize("ranks", [2, 4])
def test_ledgers_of_all_ranks_are_equal_line_by_line(ranks: int):
    outcomes = run_ranks(run_steps, ranks, 1, STEPS, ForwardMode)

    assert_agreed(outcomes, STEPS)
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)
    modes, reasons = (Counter(part) for part in zip(*outcomes[0].value, strict=True))
    assert set(modes) == set(Mode)
    assert {"bucket", "eager:above-ladder", "eager:not-recorded", "eager:image"} <= set(reasons)


def test_the_traffic_always_has_an_idle_a_prefilling_and_a_decoding_rank():
    kinds = [kinds_of_step(1, seq, 4) for seq in range(STEPS)]

    busy = [step for step in kinds if set(step) != {"idle"}]
    assert all("idle" in step and "decode" in step for step in busy)
    assert sum("prefill" in step for step in busy) > len(busy) / 2
    assert 0 < len(busy) < len(kinds)


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (SmallestForIdle, "line .* differs"),
        (EarlyReturn, "StepDesync.* rank 0 at step .*, rank 1 at step "),
        (LocalSearch, "line .* differs"),
    ],
)
def test_a_historic_fault_does_not_pass_the_ledger(fault: type[ForwardMode], shown: str):
    outcomes = run_ranks(run_steps, 2, 1, STEPS, fault, deadline_s=10.0)

    with pytest.raises(AssertionError, match=shown):
        assert_agreed(outcomes, STEPS)


def test_a_lone_rank_settles_a_step_without_a_collective():
    table = RunningTable(1)

    with CollectiveCount() as count:
        for seq in range(3):
            ForwardMode.decide(
                dummy_plan(prefill_tokens=9, decode_rows=2, seq=seq),
                exchange=LocalExchange(),
                table=table,
                late_table=RunningTable(1),
                req_graph=Recorded(4),
                token_graph=Recorded(16),
                late_graph=NoGraph(),
                policy=PLAIN,
                eager_demand=NO_DEMAND,
                tail_rows=0,
            )

    assert count.collectives == 0
    assert table.view.tolist() == [16]
