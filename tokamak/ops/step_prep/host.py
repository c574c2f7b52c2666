"""What `fill_step` and the derived tables mean, in plain loops over numpy arrays: the specification."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]


def fill_reference(
    slots: Ints,
    computed_before: Ints,
    query_starts: Ints,
    grants: Ints,
    history: Ints,
    tables: Ints,
    scheduled_requests: int,
    scheduled_tokens: int,
    block_tokens: int,
    columns: int,
    token_ids: Ints,
    positions: Ints,
    write_slots: Ints,
    block_tables: Ints,
) -> None:
    """Do in plain loops what `fill_step` does; the same arguments, as arrays."""
    for group, slot, entry, block_id in grants.T:
        tables[group, slot, entry] = block_id
    groups = range(len(tables))
    for row, slot in enumerate(slots):
        for group in groups:
            real = row < scheduled_requests
            block_tables[group, row, :columns] = tables[group, slot, :columns] if real else 0
    for request in range(scheduled_requests):
        slot, before = slots[request], computed_before[request]
        first, end = query_starts[request], query_starts[request + 1]
        for row in range(first, end):
            position = before + row - first
            token_ids[row], positions[row] = history[slot, position], position
            for group in groups:
                block = int(tables[group, slot, position // block_tokens])
                write_slots[group, row] = block * block_tokens + position % block_tokens
    for row in range(scheduled_tokens, len(token_ids)):
        token_ids[row], positions[row] = 0, 0
        write_slots[:, row] = -1


def indptrs_reference(lengths: Ints, block_tokens: int) -> Ints:
    """Running sums of blocks in use, int32 [requests + 1]."""
    sums = [0]
    for length in lengths.tolist():
        sums.append(sums[-1] + -(-length // block_tokens))
    return np.array(sums, dtype=np.int32)


def unit_tiles_reference(query_starts: Ints, width: int, room: int) -> Ints:
    """Tiles of `width` query rows, int32 [room, 2] of request and first token row, -1 past the last."""
    tiles = np.full((room, 2), -1, dtype=np.int32)
    at = 0
    for request, (first, end) in enumerate(
        zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
    ):
        for row in range(first, end, width):
            tiles[at] = request, row
            at += 1
    return tiles
