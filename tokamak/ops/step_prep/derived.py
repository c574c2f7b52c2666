"""Tables that attention kernels derive from lengths and query starts; their sizes follow from the shape alone.

Nothing is read back to the host, so a recording of a fill gives the next step's table when it is replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


def tile_room(requests: int, tokens: int, width: int) -> int:
    """The most tiles of `width` query rows that so many requests with so many token rows can have."""
    return min(tokens, (tokens + requests * (width - 1)) // width)


@op
def fill_indptrs(lengths: Tensor, block_tokens: int, indptrs: Tensor) -> None:
    """Write running sums of the blocks that cover each request's tokens, with a leading zero.

    lengths: [requests] int32. Out: indptrs [requests + 1] int32.
    """
    blocks = (lengths + (block_tokens - 1)) // block_tokens
    indptrs[:1] = 0
    indptrs[1:] = blocks.cumsum(0)


@op
def fill_unit_tiles(query_starts: Tensor, width: int, tiles: Tensor) -> None:
    """Cut every request's query rows into tiles of `width`; entries nobody needs are -1.

    query_starts: [requests + 1] int32. Out: tiles [tile_room, 2] int32, the request and the first token row.
    """
    lens = query_starts[1:] - query_starts[:-1]
    each = (lens + (width - 1)) // width
    ends = each.cumsum(0)
    at = torch.arange(len(tiles), dtype=ends.dtype, device=tiles.device)
    found = torch.searchsorted(ends, at, right=True)
    request = found.clamp(max=len(lens) - 1)
    before = (ends - each).index_select(0, request)
    first = query_starts.index_select(0, request) + (at - before) * width
    real = at < ends[-1:]
    tiles[:, 0] = torch.where(real, request, -1)
    tiles[:, 1] = torch.where(real, first, -1)
