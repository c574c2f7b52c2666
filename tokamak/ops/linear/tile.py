"""How does a kernel for few rows divide a weight? By a table of what was measured, else by a rule.

Nothing is timed when a model starts: the same weight gets the same tile on every start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a weight that a program takes at a time."""

    features: int
    """Rows of the weight a program multiplies; of gate and of up as many each."""
    columns: int
    """Columns taken at a time: by the program where there is one row, else by every warp."""
    warps: int
    stages: int = 1
    """Tiles under way at a time; one row keeps all of its tiles under way by itself."""


LANE_COLUMNS = 8
"""Numbers of 16 bits a lane loads at a time: 16 bytes."""
WARP_COLUMNS = 32 * LANE_COLUMNS
MOST_PROGRAMS = 2048
"""Programs of 4 warps that fit an H200 at once, about."""

MEASURED: dict[tuple[int, int, int, bool], Tile] = {}
"""Tiles by row class (1, 8 or 16), features, columns and whether the weight is gate and up."""


def row_class(rows: int) -> int:
    """1, 8 or 16: kernels are compiled for these numbers of rows."""
    return 1 if rows == 1 else 8 if rows <= 8 else 16


def tile_for(rows: int, features: int, columns: int, *, gated: bool = False) -> Tile:
    """The tile of a [features, columns] weight for products with 1 to 16 rows."""
    measured = MEASURED.get((row_class(rows), features, columns, gated))
    if measured is not None:
        return measured
    parts = features // 2 if gated else features
    return _one_row(parts, columns, gated) if rows == 1 else _several_rows(parts, gated)


def _one_row(features: int, columns: int, gated: bool) -> Tile:
    """Programs small enough that all of them run at once where that leaves each enough bytes under way."""
    warps = 4 if columns >= 4 * WARP_COLUMNS else 2 if columns >= 2 * WARP_COLUMNS else 1
    each = 2 if features <= 2 * MOST_PROGRAMS or gated else 4
    return Tile(each, warps * WARP_COLUMNS, warps)


def _several_rows(features: int, gated: bool) -> Tile:
    """Tensor cores take 16 features at least; a wider tile reads the rows of x less often."""
    each = 16 if features < 4096 or gated else 32
    return Tile(each, 64, 4, 4)
