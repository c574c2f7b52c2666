"""Where do a step's rows lie in one cache group? Prefix views of fixed buffers, and tables derived from them.

A derived table is filled on the device by its first reader in a forward; later readers get the same tensor.
The start of a forward drops all of them: buffers keep their addresses, so that a recorded fill is found by
whoever was recorded reading it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokamak.errors import FillSite
from tokamak.ops.step_prep.derived import fill_indptrs, fill_unit_tiles, tile_room

Site = Callable[[], str]
"""Where the forward is: in a recorded "segment", in an eager "region", or at its "begin"."""

BEGIN = "begin"
"""What is filled here may be read everywhere."""


@dataclass(slots=True, kw_only=True)
class PagedBuffers:
    """The fixed device buffers of one cache group, as large as any step."""

    block_table: Tensor  # [max_requests, blocks] int32
    lengths: Tensor  # [max_requests] int32
    write_slots: Tensor  # [max_tokens] int64
    query_starts: Tensor  # [max_requests + 1] int32
    block_tokens: int
    fill_indptrs: Callable[[Tensor, int, Tensor], None] = fill_indptrs.reference
    """The bound op; likewise below."""
    fill_unit_tiles: Callable[[Tensor, int, Tensor], None] = fill_unit_tiles.reference
    site: Site | None = None
    """Where a table is read, to check that readers and fill agree; None checks nothing."""
    _made: dict[int, Tensor] = field(default_factory=dict)

    def view(self, running_requests: int, running_tokens: int) -> PagedView:
        """The prefixes that a step of this size reads."""
        return PagedView(self, running_requests, running_tokens)

    def of_rows(self, write_slots: Tensor, query_starts: Tensor) -> PagedBuffers:
        """The same requests with other token rows, which have derived tables of their own."""
        return replace(self, write_slots=write_slots, query_starts=query_starts, _made={})

    def table(self, width: int) -> Tensor:
        """The buffer of a derived table: tiles of `width` [tiles, 2], or running sums (width 0) [sums].

        Made once, by the first un-recorded reader, at the largest size.
        """
        if width not in self._made:
            requests, tokens = len(self.lengths), len(self.write_slots)
            shape = (tile_room(requests, tokens, width), 2) if width else (requests + 1,)
            self._made[width] = torch.zeros(shape, dtype=torch.int32, device=self.lengths.device)
        return self._made[width]


class PagedView:
    """Implements `core.inputs.Rows` over a group's buffers, for one size of step."""

    def __init__(self, buffers: PagedBuffers, running_requests: int, running_tokens: int) -> None:
        self.block_table: Tensor = buffers.block_table[:running_requests]
        self.lengths: Tensor = buffers.lengths[:running_requests]
        self.write_slots: Tensor = buffers.write_slots[:running_tokens]
        self.block_tokens: int = buffers.block_tokens
        self.fills = 0
        """Fills launched so far, of all derived tables."""
        self._buffers = buffers
        self._query_starts = buffers.query_starts[: running_requests + 1]
        self._filled: dict[int, tuple[Tensor, str]] = {}

    def indptrs(self) -> Tensor:
        """Running sums of the blocks in use, int32 [requests + 1]; filled by the first reader."""
        found = self._find(0, "indptrs")
        if found is None:
            found = self._buffers.table(0)[: len(self.lengths) + 1]
            self._buffers.fill_indptrs(self.lengths, self.block_tokens, found)
            self._note(0, found)
        return found

    def unit_tiles(self, width: int) -> Tensor:
        """Tiles of `width` query rows: request and first token row, -1 past the last. int32 [tiles, 2].

        As many entries as a step of this size can have tiles; filled by the first reader.
        """
        found = self._find(width, f"unit_tiles({width})")
        if found is None:
            room = tile_room(len(self.lengths), len(self.write_slots), width)
            found = self._buffers.table(width)[:room]
            self._buffers.fill_unit_tiles(self._query_starts, width, found)
            self._note(width, found)
        return found

    def drop(self) -> None:
        """Forget that derived tables are filled; their buffers keep their addresses."""
        self._filled.clear()

    def _find(self, width: int, name: str) -> Tensor | None:
        """A table filled in this forward.

        Raises:
            FillSite: it was filled in a recorded segment and is read in an eager region, or the reverse.
        """
        filled = self._filled.get(width)
        if filled is None:
            return None
        table, filled_at = filled
        if self._buffers.site is not None and filled_at != BEGIN:
            here = self._buffers.site()
            if here != filled_at:
                raise FillSite(
                    f"derived table {name} was filled in a {filled_at} and is read in a {here}",
                    hint="let the start of the forward read it first",
                )
        return table

    def _note(self, width: int, table: Tensor) -> None:
        site = self._buffers.site
        self._filled[width] = (table, BEGIN if site is None else site())
        self.fills += 1
