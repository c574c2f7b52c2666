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

from tokamak.cache.launch import LaunchStorage
from tokamak.errors import FillSite
from tokamak.ops.step_prep.derived import fill_indptrs, fill_unit_tiles, tile_room
from tokamak.ops.walk_plan.sizes import score_bands

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
    launch: LaunchStorage = field(default_factory=LaunchStorage)
    """Where walks through the group's index keys are planned, if it has any."""
    site: Site | None = None
    """Where a table is read, to check that readers and fill agree; None checks nothing."""
    _made: dict[int, Tensor] = field(default_factory=dict)

    def view(self, running_requests: int, running_tokens: int) -> PagedView:
        """The prefixes that a step of this size reads."""
        return PagedView(self, running_requests, running_tokens)

    def of_rows(self, write_slots: Tensor, query_starts: Tensor) -> PagedBuffers:
        """The same requests with other token rows, which have derived tables of their own.

        Requests may have no row among them, so that rows are not as wide as plans of walks take them to be: there are none.
        """
        return replace(
            self,
            write_slots=write_slots,
            query_starts=query_starts,
            launch=LaunchStorage(),
            _made={},
        )

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
        self._size = (running_requests, running_tokens)
        self._query_starts = buffers.query_starts[: running_requests + 1]
        self._filled: dict[object, tuple[Tensor, str]] = {}

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

    def walk_plans(
        self, positions: Tensor, q_width: int, *, ratio: int, keep: int, columns: int
    ) -> Tensor | None:
        """Plans by which programs walk through index keys, int32 [bands, programs, 4]; filled by the first reader.

        None where the scorer walks by no plan: where it is no kernel, or for more rows than there are programs.

        positions: int32 [tokens], of a step of decode rows with `q_width` rows each. A row sees a key for every `ratio` of
        its tokens and needs no scores of up to `keep`; the scores of a row take up to `columns` (`score_bands`).
        """
        launch, (requests, tokens) = self._buffers.launch, self._size
        if not launch.is_for(requests, tokens, q_width):
            return None
        bands = score_bands(tokens, columns)
        key = ("walk", ratio, keep)
        found = self._find(key, f"walk_plans(ratio={ratio}, keep={keep})")
        if found is None:
            widest = self._buffers.block_table.shape[1] * self.block_tokens // ratio
            room = launch.plans(
                ratio,
                keep,
                max_tokens=len(self._buffers.write_slots),
                columns=widest,
                like=positions,
            )
            found = room[: len(bands)]
            launch.fill(self._query_starts, positions, q_width, ratio, keep, bands[0].stop, found)
            self._note(key, found)
        assert len(found) == len(bands), f"{len(bands)} bands of a step planned in {len(found)}"
        return found

    def drop(self) -> None:
        """Forget that derived tables are filled; their buffers keep their addresses."""
        self._filled.clear()

    def _find(self, key: object, name: str) -> Tensor | None:
        """A table filled in this forward.

        Raises:
            FillSite: it was filled in a recorded segment and is read in an eager region, or the reverse.
        """
        filled = self._filled.get(key)
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

    def _note(self, key: object, table: Tensor) -> None:
        site = self._buffers.site
        self._filled[key] = (table, BEGIN if site is None else site())
        self.fills += 1
