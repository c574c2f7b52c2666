"""Where are launches of the index scorer planned? In buffers of one cache group, which all of its layers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.sizes import FIELDS, PIECE_ROWS, piece_room, score_bands

FillWalkPlan = Callable[[Tensor, Tensor, int, int, int, int, Tensor], None]


@dataclass(slots=True, kw_only=True)
class LaunchStorage:
    """One object per group with index keys (AD-7); `PagedView.walk_plans` fills it and hands it to layers."""

    programs: int = 0
    """How many walk at once; 0 where nobody reads a plan."""
    fill: FillWalkPlan = fill_walk_plan.reference
    """The bound op."""
    _plans: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def is_for(self, requests: int, tokens: int, q_width: int) -> bool:
        """Whether a step of decode rows is walked: with more pieces than programs they fill a device as they are."""
        return 0 < piece_room(requests, tokens, q_width) < self.programs

    def plans(
        self, ratio: int, keep: int, *, max_tokens: int, columns: int, like: Tensor
    ) -> Tensor:
        """The buffer of plans for keys of every `ratio` tokens: int32 [bands, programs, 4].

        Made once, by the first un-recorded reader, for the most bands that any step of walked rows has: of
        `max_tokens` rows at most, that see `columns` keys at most. like: a tensor on its device.
        """
        if (ratio, keep) not in self._plans:
            rows = min(max_tokens, PIECE_ROWS * self.programs)
            shape = (len(score_bands(rows, columns)), self.programs, FIELDS)
            self._plans[ratio, keep] = torch.zeros(shape, dtype=torch.int32, device=like.device)
        return self._plans[ratio, keep]
