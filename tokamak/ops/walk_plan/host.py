"""What a walk plan is, in plain loops over numpy arrays: the specification (PREP-16)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokamak.ops.walk_plan.sizes import CHUNK, FIELDS, PIECE_ROWS, check_pieces

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one request that are walked together."""

    first_row: int
    rows: int
    need: int
    """Chunks of keys, as many as the row that needs most."""


def cdiv(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)


def pieces_of(requests: Ints, bounds: Ints, keep: int) -> list[Piece]:
    """Rows cut into runs of one request, at most `PIECE_ROWS` each, without those that need nothing."""
    pieces: list[Piece] = []
    first, rows = 0, len(requests)
    while first < rows:
        end = first
        while end < min(rows, first + PIECE_ROWS) and int(requests[end]) == int(requests[first]):
            end += 1
        seen = [int(bound) for bound in bounds[first:end]]
        need = max(cdiv(bound, CHUNK) if bound > keep else 0 for bound in seen)
        if need:
            pieces.append(Piece(first, end - first, need))
        first = end
    return pieces


def width_of(pieces: list[Piece], programs: int) -> int:
    """The fewest chunks a program must walk so that all programs together walk all; 0 without pieces."""
    width = cdiv(sum(piece.need for piece in pieces), programs)
    while pieces and sum(cdiv(piece.need, width) for piece in pieces) > programs:
        width += 1
    return width


def walk_plan_reference(requests: Ints, bounds: Ints, programs: int, keep: int) -> Ints:
    """Deal chunks of keys to programs so that they end together.

    requests, bounds: [rows], the request of each row and how many keys it sees. A row that sees no more than `keep`
    needs no scores: it takes all of them. Returns int32 [programs, 4]: first row, row count, first chunk, end chunk;
    tasks in order of rows, then zeros.

    Raises:
        WalkPlanOverflow: there are as many pieces as programs, or more.
    """
    pieces = pieces_of(requests, bounds, keep)
    check_pieces(len(pieces), programs)
    width = width_of(pieces, programs)
    plan = np.zeros((programs, FIELDS), dtype=np.int32)
    task = 0
    for piece in pieces:
        parts = cdiv(piece.need, width)
        for part in range(parts):
            borders = part * piece.need // parts, (part + 1) * piece.need // parts
            plan[task] = piece.first_row, piece.rows, *borders
            task += 1
    return plan
