"""The tensors of one step, as the model's layers receive them.

Token rows are laid out request by request, prefill rows first, padding last. All tensors are views of fixed
buffers: a recording made with one step's inputs reads the next step's at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Rows(Protocol):
    """Where one cache group's rows lie for this step (`cache/view.py` `PagedView`)."""

    block_table: (
        Tensor  # [requests, blocks]  int32, entries past a request's blocks are 0 (null block)
    )
    lengths: (
        Tensor  # [requests]           int32, tokens visible to the last query, this step's included
    )
    write_slots: Tensor  # [tokens]            int64, block * block_tokens + offset, -1 for padding
    block_tokens: int

    def indptrs(self) -> Tensor:
        """Running sums of the blocks in use, int32 [requests + 1]; filled by the first reader of a forward."""
        ...

    def unit_tiles(self, width: int) -> Tensor:
        """Tiles of `width` query rows, int32 [tiles, 2] (request, first row); filled by the first reader."""
        ...

    def walk_plans(
        self, positions: Tensor, q_width: int, *, ratio: int, keep: int, columns: int
    ) -> Tensor | None:
        """Plans by which programs walk through index keys, int32 [bands, programs, 4]; filled by the first reader."""
        ...

    def drop(self) -> None:
        """Forget that derived tables are filled; their buffers keep their addresses."""
        ...


@dataclass(slots=True)
class StepInputs:
    """What a model's forward reads. Integers of a step are in its StepShape and AttnStep, but for `q_width`."""

    token_ids: Tensor  # [tokens]          int32
    positions: Tensor  # [tokens]          int32, 0 for padding
    query_starts: Tensor  # [requests + 1]    int32, first token row of each request
    logit_rows: Tensor  # [sampled]         int32, token rows whose logits are wanted
    rows: Mapping[str, Rows]  # by cache group
    q_width: int = 0
    """Token rows of every request in a step of decode rows alone, else 0. No recording holds for two of them."""
    history: Tensor | None = (
        None  # [slots, positions] int32, all known tokens; None in steps made without a runner
    )
    slots: Tensor | None = None  # [requests] int32, whose history a request row has
    window_starts: Tensor | None = (
        None  # [requests] int32, the first position whose window rows there are; None: all are
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnHalf:
    """Request rows of one kind, with their real sizes; padding belongs to no half."""

    first_request: int
    last_request: int
    """One past the last."""
    first_token: int
    last_token: int
    """One past the last."""
    q_width: int
    """Token rows of every request; 0 where they differ (prefill)."""
    query_starts: Tensor
    """int32 [requests + 1], counted from first_token."""
    longest_tokens: int
    """No request of the half sees more; all a block table holds where the step may be recorded whole."""

    @property
    def requests(self) -> slice:
        """These rows of per-request tables."""
        return slice(self.first_request, self.last_request)

    @property
    def tokens(self) -> slice:
        """These rows of per-token tensors."""
        return slice(self.first_token, self.last_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnStep:
    """How attention runs over a step: prefill rows, decode rows, or first the one and then the other.

    Without either, all rows are padding: late layers of a rank whose prompts have none of their newest rows here.
    """

    prefill: AttnHalf | None
    decode: AttnHalf | None

    @property
    def halves(self) -> tuple[AttnHalf, ...]:
        """Those there are, in row order."""
        return tuple(half for half in (self.prefill, self.decode) if half is not None)

    @property
    def tokens(self) -> int:
        """Token rows of both halves; rows behind them are padding."""
        halves = self.halves
        return halves[-1].last_token if halves else 0
