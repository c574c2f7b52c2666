"""Are ranks that disagree, or are gone, named before anyone computes with them?"""

from __future__ import annotations

import os
import re
import time

import pytest
import torch

from benchmarks.engine.exchange_time import measure_exchange
from tests.support.ranks import CollectiveCount, Outcome, Rank, run_ranks
from tokamak.errors import ConfigMismatch, ExchangeTimeout, StepDesync
from tokamak.graphs.ladder import Ladder
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import COLUMNS, RankRow, config_text, rank_row


def a_row(seq: int, tokens: int = 3) -> RankRow:
    return rank_row(dummy_plan(prefill_tokens=tokens, decode_rows=0, seq=seq))


def messages(outcomes: list[Outcome], kind: type[Exception]) -> list[str]:
    """What every rank raised, all of one kind."""
    for outcome in outcomes:
        assert isinstance(outcome.error, kind), f"rank {outcome.rank}: {outcome}"
    return [str(outcome.error) for outcome in outcomes]


def gather_and_vote(rank: Rank) -> tuple[list[list[int]], list[bool], bool, float | None]:
    with torch.device("meta"):  # a default device that no transport can read
        exchange = rank.exchange()
    first = exchange.gather_rows(a_row(1, tokens=10 + rank.rank))
    second = exchange.gather_rows(a_row(2, tokens=20 + rank.rank))
    votes = [exchange.vote(True), exchange.vote(rank.rank == 0), exchange.vote(False)]
    same = first is second and not second.flags.writeable
    return second.tolist(), votes, same, exchange.last_s


def test_rows_of_all_ranks_arrive_in_buffers_that_are_made_once():
    outcomes = run_ranks(gather_and_vote, 2)

    expected = [list(a_row(2, tokens=20)), list(a_row(2, tokens=21))]
    for outcome in outcomes:
        assert outcome.returned, outcome
        rows, votes, same, last_s = outcome.value
        assert rows == expected
        assert votes == [True, False, False]
        assert same
        assert 0.0 < last_s < 20.0


def one_exchange(rank: Rank) -> int:
    exchange = rank.exchange()
    with CollectiveCount() as count:
        exchange.gather_rows(a_row(1))
    return count.collectives


def test_a_step_of_several_ranks_makes_one_collective():
    outcomes = run_ranks(one_exchange, 2)

    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert outcomes[0].ledger == [f"dp allgather {[len(COLUMNS)] * 2}"]


def ahead(rank: Rank) -> None:
    exchange = rank.exchange()
    exchange.gather_rows(a_row(7))
    exchange.gather_rows(a_row(8 + rank.rank))


def test_ranks_at_different_steps_are_named_with_their_steps():
    outcomes = run_ranks(ahead, 2)

    for message in messages(outcomes, StepDesync):
        assert "rank 0 at step 8, rank 1 at step 9" in message


def other_ladder(rank: Rank) -> None:
    ladder = Ladder((64,) if rank.rank else (64, 128))
    exchange = rank.exchange()
    exchange.introduce(config_text({"token_sizes": ladder}, {"drafts": False}))


def test_ranks_of_different_configs_are_told_which_setting_differs_before_the_first_step():
    outcomes = run_ranks(other_ladder, 2)

    for message in messages(outcomes, ConfigMismatch):
        assert "token_sizes is [64, 128] on rank 0, [64] on rank 1" in message
        assert "drafts" not in message


def silent(rank: Rank, how: str) -> None:
    exchange = rank.exchange(timeout_s=1.0)
    exchange.gather_rows(a_row(1))
    if rank.rank == 1:
        if how == "gone":
            os._exit(3)
        time.sleep(60)
    exchange.gather_rows(a_row(2))


@pytest.mark.parametrize("how", ["gone", "hangs"])
def test_a_rank_that_does_not_answer_is_named_by_those_that_do(how: str):
    started = time.monotonic()
    outcomes = run_ranks(silent, 3, how, deadline_s=6.0)

    for message in messages([outcomes[0], outcomes[2]], ExchangeTimeout):
        assert re.search(r"the exchange of step 2 failed after .* of at most 1 s", message)
        assert "no answer from rank 1; answered: ranks 0, 2" in message
    assert outcomes[1].error is None
    assert outcomes[1].exit_code == (3 if how == "gone" else 1)
    assert ("time.sleep" in outcomes[1].dump or "in silent" in outcomes[1].dump) == (how == "hangs")
    assert time.monotonic() - started < 30


class GoneStore:
    """A store whose host has ended."""

    def set(self, key: str, value: str, /) -> None:
        raise ConnectionError(f"cannot put {key} = {value}")

    def get(self, key: str, /) -> bytes:
        raise ConnectionError(f"cannot get {key}")

    def check(self, keys: list[str], /) -> bool:
        raise ConnectionError(f"cannot check {keys}")


def without_store(rank: Rank) -> None:
    rank.store = GoneStore()
    exchange = rank.exchange(timeout_s=1.0)
    if rank.rank == 0:
        exchange.vote(True)


def test_without_a_store_the_failure_is_told_still():
    outcomes = run_ranks(without_store, 2)

    message = str(outcomes[0].error)
    assert isinstance(outcomes[0].error, ExchangeTimeout)
    assert "a vote failed" in message
    assert "rank 0; the store that lists the ranks which answered is gone as well" in message


def late(rank: Rank) -> None:
    exchange = rank.exchange(timeout_s=1.0)
    exchange.gather_rows(a_row(1))
    if rank.rank == 1:
        time.sleep(1.3)
    exchange.gather_rows(a_row(2))


def test_a_rank_that_is_late_is_told_from_one_that_is_gone():
    outcomes = run_ranks(late, 2)

    for message in messages(outcomes, ExchangeTimeout):
        assert "ranks 0, 1 answered afterwards" in message


def test_the_exchange_is_measured_and_counted_for_any_number_of_ranks():
    rows = [measure_exchange(ranks, 20) for ranks in (1, 2)]

    assert [row["ranks"] for row in rows] == [1, 2]
    assert [row["collectives"] for row in rows] == [0, 1]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
