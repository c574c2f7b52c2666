"""How a step's rows ended: what the next step may need to know on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokamak.core.plan import Int32s

NO_ROW = -1
"""In an index of rows: the request was not in that step, so the plan's own numbers hold for it."""
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrevStatus:
    """A step's verdict, by its own request rows."""

    accepted: Int32s  # [rows] drafted tokens that were right
    rejected: Int32s  # [rows] drafted tokens that were wrong; 0 for prefill rows
    next_token: Int32s  # [rows] the token sampled after them, NO_TOKEN where none was


def of_rows(values: Int32s, rows: Int32s) -> Int32s:
    """The values of some rows of a status, 0 for NO_ROW: what was not there has rejected nothing."""
    if not len(values):
        return np.zeros(len(rows), dtype=np.int32)
    return np.where(rows == NO_ROW, np.int32(0), values[rows])
