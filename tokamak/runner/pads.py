"""Does a real row read padding? While padding is watched, all it can read is NaN, and a row that does shows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokamak.cache.blocks import NULL_BLOCK
from tokamak.core.plan import StepShape


class PadWatch:
    """Off: pad rows are zeros. On: the null block they attend to and what regions leave in them are NaN.

    `blocks` are the views of all caches, each [blocks, ...]; integer caches are left alone.
    """

    def __init__(self, blocks: Sequence[Tensor], *, poison: bool) -> None:
        self._blocks = [view for view in blocks if view.is_floating_point()]
        self._poison = poison
        self.value = float("nan") if poison else 0.0

    def prepare(self, shape: StepShape) -> None:
        """Poison the null block before a step with real rows; a dummy's rows are all padding and write there."""
        if self._poison and not shape.dummy:
            for view in self._blocks:
                view[NULL_BLOCK].fill_(self.value)
