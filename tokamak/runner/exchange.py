"""What data-parallel ranks must know of each other before a step: one row of numbers per rank.

At dp = 1 the table is this rank's row and no collective is issued (SH-1).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from tokamak.core.plan import StepPlan

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank's row (SH-3); its fields are the columns of the gathered table."""

    seq: int
    has_work: int
    scheduled_tokens: int
    scheduled_requests: int
    prefill_rows: int
    max_query: int
    """The widest decode row."""
    eager_demand: int
    """A bit set of reasons this rank's step cannot be recorded."""


COLUMNS = {field.name: at for at, field in enumerate(fields(RankRow))}


def rank_row(plan: StepPlan, eager_demand: int = 0) -> RankRow:
    """The row of a plan."""
    decode = plan.query_lens[plan.prefill_rows :]
    return RankRow(
        seq=plan.seq,
        has_work=int(plan.scheduled_requests > 0),
        scheduled_tokens=plan.scheduled_tokens,
        scheduled_requests=plan.scheduled_requests,
        prefill_rows=plan.prefill_rows,
        max_query=int(decode.max()) if len(decode) else 1,
        eager_demand=eager_demand,
    )


class LocalExchange:
    """The exchange of a single rank."""

    ranks = 1
    rank = 0

    def gather_rows(self, row: RankRow) -> Rows:
        """This rank's row as a table, int32 [1, columns]."""
        return np.array([astuple(row)], dtype=np.int32)
