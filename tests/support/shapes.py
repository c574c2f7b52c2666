"""Rows, graphs and shapes for tests of the step's size, made of the real classes."""

from __future__ import annotations

import numpy as np

from tokamak.core.plan import StepShape
from tokamak.graphs.ladder import Ladder
from tokamak.runner.exchange import RankRow
from tokamak.runner.shape import (
    ForwardMode,
    Policy,
    RequestBuckets,
    RunningTable,
    TokenBuckets,
)

DRAFTS = Policy(drafts=True)
PLAIN = Policy(drafts=False)


class NoGraph:
    """Graphs off: nothing is recorded, so every step runs eagerly."""

    ladder = Ladder(())

    def bucket(self, size: int, /, *, q_width: int = 1, split: bool = False) -> int | None:
        """No bucket."""
        del size, q_width, split
        return None


class Recorded:
    """A stand-in for a graph: the buckets of its ladder are recorded, but for some."""

    def __init__(self, *buckets: int, missing: tuple[int, ...] = ()) -> None:
        self.ladder = Ladder.of(buckets, limit=4096, option="test")
        self._missing = missing

    def bucket(self, size: int, /, *, q_width: int = 1, split: bool = False) -> int | None:
        """The recorded bucket that holds so many."""
        del q_width, split
        found = self.ladder.ceil(size)
        return None if found in self._missing else found


def settle(
    rows: list[RankRow],
    rank: int,
    *,
    req_graph: RequestBuckets | None = None,
    token_graph: TokenBuckets | None = None,
    late_graph: TokenBuckets | None = None,
    policy: Policy = PLAIN,
) -> tuple[StepShape, list[int]]:
    """The shape a rank settles on, and the running table it leaves."""
    table = RunningTable(len(rows))
    shape = ForwardMode.settle(
        np.array(rows, dtype=np.int32),
        rank=rank,
        table=table,
        late_table=RunningTable(len(rows)),
        req_graph=req_graph or NoGraph(),
        token_graph=token_graph or NoGraph(),
        late_graph=late_graph or NoGraph(),
        policy=policy,
    )
    return shape, table.view.tolist()


def a_row(
    *,
    prefill: tuple[int, ...] = (),
    finals: int = 0,
    decode: int = 0,
    width: int = 1,
    eager: int = 0,
    tail: int = 0,
) -> RankRow:
    """What a rank tells of a step with these prefill rows (tokens each), decode rows, demands and tail rows."""
    return RankRow(
        seq=1,
        has_work=int(bool(prefill or decode)),
        scheduled_tokens=sum(prefill) + decode * width,
        scheduled_requests=len(prefill) + decode,
        prefill_rows=len(prefill),
        max_query=width if decode else 1,
        eager_demand=eager,
        draft_rows=finals + decode,
        tail_rows=tail,
        config_hash=0,
    )
