"""The walk plan in plain PyTorch, laid out where the step's numbers are; `host.py` says the same in plain loops.

No number is read to the host, and sizes follow from the shape alone: a recorded fill plans the next step when it is
replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op
from tokamak.ops.walk_plan.sizes import CHUNK, PIECE_ROWS, check_pieces, piece_room

WAYS, ROUNDS = 64, 4
"""So many widths are tried at once, so often: an int32 of keys has at most 2 ** 24 = 64 ** 4 chunks."""


@op
def fill_walk_plan(
    query_starts: Tensor,
    positions: Tensor,
    q_width: int,
    ratio: int,
    keep: int,
    band_rows: int,
    plans: Tensor,
) -> None:
    """Deal the index keys of a step's rows to programs, for one band of rows after another (PREP-16).

    A row at position t sees the first (t + 1) // ratio keys of its request; one that sees no more than `keep` takes
    all of them and needs no scores. Rows are cut into pieces of at most PIECE_ROWS of one request and band; a piece
    needs as many chunks of CHUNK keys as the row that needs most, and is split into equal parts of at most w chunks,
    w the smallest with which all parts are at most as many as programs.

    query_starts: [requests + 1] int32; rows behind the last belong to nobody. positions: [tokens] int32.
    q_width: rows of every request, or 0 where they differ.
    Out: plans [bands, programs, 4] int32, a task each: first row of the step, row count, first chunk, end chunk. Tasks
    come in order of rows, zeros behind the last.

    Raises:
        WalkPlanOverflow: so many requests and rows could have as many pieces as there are programs.
    """
    requests, tokens = query_starts.shape[0] - 1, positions.shape[0]
    room = piece_room(requests, tokens, q_width)
    check_pieces(room, plans.shape[1])
    if not room:
        plans.zero_()
        return
    borders = torch.arange(plans.shape[0] + 1, device=plans.device) * band_rows
    starts = query_starts.long().clamp(max=tokens)
    starts = starts.clamp(min=borders[:-1, None]).clamp(max=borders[1:, None])
    first, rows = _pieces(starts, room)
    _lay_out(first, rows, _needs(first, rows, positions, ratio, keep), plans)


def _pieces(starts: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """First rows and row counts of pieces, int64 [bands, room]. starts: int64 [bands, requests + 1]."""
    lens = starts[:, 1:] - starts[:, :-1]
    each = (lens + (PIECE_ROWS - 1)) // PIECE_ROWS
    ends = each.cumsum(1)
    at = torch.arange(room, device=starts.device).expand(len(starts), -1).contiguous()
    request = torch.searchsorted(ends, at, right=True).clamp(max=lens.shape[1] - 1)
    place = (at - (ends - each).gather(1, request)) * PIECE_ROWS
    # Behind the last piece these are negative.
    rows = (lens.gather(1, request) - place).clamp(min=0, max=PIECE_ROWS)
    return starts.gather(1, request) + place, rows


def _needs(first: Tensor, rows: Tensor, positions: Tensor, ratio: int, keep: int) -> Tensor:
    """How many chunks each piece needs, int64 in the shape of `first`: what its longest row does."""
    place = torch.arange(PIECE_ROWS, device=first.device)
    real = place < rows.unsqueeze(2)
    at = torch.where(real, first.unsqueeze(2) + place, 0)
    bounds = (positions.index_select(0, at.reshape(-1)).view(at.shape).long() + 1) // ratio
    return torch.where(real & (bounds > keep), (bounds + (CHUNK - 1)) // CHUNK, 0).amax(dim=2)


def _lay_out(first: Tensor, rows: Tensor, need: Tensor, plans: Tensor) -> None:
    """Split pieces, int64 [bands, room], and write the tasks."""
    programs = plans.shape[1]
    width = _widths(need, programs)
    parts = (need + (width - 1)) // width
    ends = parts.cumsum(1)
    task = torch.arange(programs, device=plans.device).expand(len(plans), -1).contiguous()
    piece = torch.searchsorted(ends, task, right=True).clamp(max=need.shape[1] - 1)
    count, needed = parts.gather(1, piece), need.gather(1, piece)
    part = task - (ends.gather(1, piece) - count)
    chunks = [number * needed // count.clamp(min=1) for number in (part, part + 1)]
    real = task < ends[:, -1:]
    for field, numbers in enumerate((first.gather(1, piece), rows.gather(1, piece), *chunks)):
        plans[:, :, field] = torch.where(real, numbers, 0)


def _widths(need: Tensor, programs: int) -> Tensor:
    """The fewest chunks a program of each band must walk: int64 [bands, 1]."""
    total, spare = need.sum(1, keepdim=True), programs - (need > 0).sum(1, keepdim=True)
    low = ((total + (programs - 1)) // programs).clamp(min=1)
    high = torch.maximum((total + (spare - 1)) // spare, low)
    for _ in range(ROUNDS):
        step = (high - low + WAYS) // WAYS
        tried = torch.minimum(low + step * torch.arange(1, WAYS + 1, device=need.device) - 1, high)
        parts = (need.unsqueeze(1) + (tried - 1).unsqueeze(2)) // tried.unsqueeze(2)
        too_narrow = (parts.sum(2) > programs).sum(1, keepdim=True)
        low, high = low + step * too_narrow, tried.gather(1, too_narrow)
    return high
