"""How large a step is, how it runs, and why: a StepPlan becomes a StepShape.

`decide` is the exchange followed by `settle`; `settle` is a pure function of the gathered rows, so every
rank can compute every other rank's shape (runner requirements SH-1 to SH-9).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.runner.exchange import COLUMNS, RankRow, Rows, rank_row


class Exchange(Protocol):
    """Carries one row per rank and step."""

    rank: int

    def gather_rows(self, row: RankRow) -> Rows:
        """All ranks' rows, int32 [ranks, columns]."""
        ...


class TokenBuckets(Protocol):
    """Answers which token bucket a step can replay; None if no recording fits."""

    def bucket(self, tokens: int, /) -> int | None:
        """The recorded bucket that holds so many token rows."""
        ...


class RequestBuckets(Protocol):
    """Answers which request bucket a uniform decode step can replay; None if no recording fits."""

    def bucket(self, requests: int, /, *, q_width: int) -> int | None:
        """The recorded bucket that holds so many request rows of this width."""
        ...


class NoGraph:
    """Graphs off: nothing is recorded, so every step runs eagerly."""

    def bucket(self, size: int, *, q_width: int = 1) -> int | None:
        """No bucket."""
        del size, q_width
        return None


class RunningTable:
    """How many token rows each data-parallel rank runs; overwritten in place every step."""

    def __init__(self, ranks: int) -> None:
        self._tokens = np.zeros(ranks, dtype=np.int32)
        self.view: npt.NDArray[np.int32] = self._tokens.view()
        self.view.flags.writeable = False

    def fill(self, tokens: npt.NDArray[np.int32]) -> None:
        """Overwrite the table; only `ForwardMode.settle` calls this."""
        self._tokens[:] = tokens


class ForwardMode:
    """The decision point for the size and mode of a step."""

    @staticmethod
    def decide(
        plan: StepPlan,
        *,
        exchange: Exchange,
        table: RunningTable,
        req_graph: RequestBuckets,
        token_graph: TokenBuckets,
    ) -> StepShape:
        """Settle this rank's shape after hearing from all ranks; one exchange, nothing else."""
        rows = exchange.gather_rows(rank_row(plan))
        return ForwardMode.settle(
            rows, rank=exchange.rank, table=table, req_graph=req_graph, token_graph=token_graph
        )

    @staticmethod
    def settle(
        rows: Rows,
        *,
        rank: int,
        table: RunningTable,
        req_graph: RequestBuckets,
        token_graph: TokenBuckets,
    ) -> StepShape:
        """The shape of `rank`, from the same rows on every rank."""
        column = {name: rows[:, at] for name, at in COLUMNS.items()}
        has_work = column["has_work"] > 0
        tokens = np.where(has_work, column["scheduled_tokens"], 1)
        requests = np.where(has_work, column["scheduled_requests"], 1)
        eager = int(np.bitwise_or.reduce(column["eager_demand"]))
        if not has_work.any():
            table.fill(np.zeros(len(rows), dtype=np.int32))
            return _shape(rows[rank], Mode.EAGER, 0, 0, 0, uniform=True, why="idle")
        if (column["prefill_rows"] > 0).any():
            bucket = None if eager else token_graph.bucket(int(tokens.max()))
            running = tokens if bucket is None else np.full(len(rows), bucket)
            table.fill(running.astype(np.int32))
            return _shape(
                rows[rank],
                Mode.EAGER if bucket is None else Mode.TOKEN_GRAPH,
                int(requests[rank]),
                int(running[rank]),
                0,
                uniform=bool((running == running[0]).all()),
                why=_why(bucket, eager),
            )
        q_width = int(column["max_query"].max())
        largest = int(requests.max())
        bucket = None if eager else req_graph.bucket(largest, q_width=q_width)
        running_requests = largest if bucket is None else bucket
        running_tokens = running_requests * q_width
        table.fill(np.full(len(rows), running_tokens, dtype=np.int32))
        return _shape(
            rows[rank],
            Mode.EAGER if bucket is None else Mode.REQUEST_GRAPH,
            running_requests,
            running_tokens,
            q_width,
            uniform=True,
            why=_why(bucket, eager),
        )


def _why(bucket: int | None, eager_demand: int) -> str:
    if bucket is not None:
        return "bucket"
    return f"eager:demand-{eager_demand:x}" if eager_demand else "eager:no-bucket"


def _shape(
    row: npt.NDArray[np.int32],
    mode: Mode,
    running_requests: int,
    running_tokens: int,
    q_width: int,
    *,
    uniform: bool,
    why: str,
) -> StepShape:
    return StepShape(
        mode=mode,
        dummy=not row[COLUMNS["has_work"]],
        scheduled_requests=int(row[COLUMNS["scheduled_requests"]]),
        scheduled_tokens=int(row[COLUMNS["scheduled_tokens"]]),
        running_requests=running_requests,
        running_tokens=running_tokens,
        q_width=q_width,
        cut=None,
        uniform_rows=uniform,
        why=why,
    )
