"""What do a walk plan and its scorer agree on? Rows of a piece, keys of a chunk, programs, and rows scored together."""

from __future__ import annotations

import torch

from tokamak.device.facts import DeviceFacts
from tokamak.errors import WalkPlanOverflow
from tokamak.ops.paged_rows import bands
from tokamak.ops.step_prep.derived import tile_room
from tokamak.ops.triton_facts import fits

PIECE_ROWS = 6
"""Consecutive rows of a request, at most, that share a reading of keys: a sampled token and five drafts."""
CHUNK = 128
"""Keys; a program walks through whole chunks."""
FIELDS = 4
"""Of a task: first row, row count, first chunk, end chunk. Zeros are no task."""
PROGRAMS_A_PROCESSOR = 2
"""As many as have their keys in the memory of a multiprocessor at once."""
ALIGNED = 16
"""Rows of scores begin at multiples of so many, to be written in whole pieces."""
SCORE_ROOM = 1 << 24
"""Scores that are in memory at once: those of a band of rows. A row of more has a band of its own."""


def walk_programs(facts: DeviceFacts, device: torch.device) -> int:
    """How many programs walk at once on a device: 0 where the scorer is no kernel and needs no plan."""
    if not fits(facts):
        return 0
    properties = torch.cuda.get_device_properties(device)
    return PROGRAMS_A_PROCESSOR * properties.multi_processor_count


def piece_room(requests: int, tokens: int, q_width: int) -> int:
    """The most pieces that so many requests with so many token rows can have; q_width rows each, or 0 where they differ."""
    if q_width:
        return requests * -(-q_width // PIECE_ROWS)
    return tile_room(requests, tokens, PIECE_ROWS)


def check_pieces(pieces: int, programs: int) -> None:
    """A plan needs a program more than there are pieces, or dealing them out evenly has no bound.

    Raises:
        WalkPlanOverflow: there are not.
    """
    if pieces >= programs:
        raise WalkPlanOverflow(
            f"{pieces} pieces of {PIECE_ROWS} rows are to be walked by {programs} programs",
            hint="score steps of so many rows without a plan: they fill the device as they are",
        )


def score_width(columns: int) -> int:
    """Numbers a row of scores takes."""
    return -(-columns // ALIGNED) * ALIGNED


def score_bands(rows: int, columns: int) -> list[slice]:
    """Rows that are scored together, where each has so many scores at most."""
    return bands(rows, score_width(columns), SCORE_ROOM)
