"""Which forwards are recorded by request count? Uniform decode and drafts: one segment, as a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tokamak.graphs.region import EagerRegion
from tokamak.graphs.region_graph import RegionGraph


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The size of a recorded decode step."""

    requests: int
    q_width: int
    """Token rows of every request."""
    split: bool = False
    """Whether it runs as two batches."""

    def __str__(self) -> str:
        """Such as `8`, `8x4` or `8x4 split`."""
        width = f"x{self.q_width}" if self.q_width > 1 else ""
        return f"{self.requests}{width}{' split' if self.split else ''}"


class ReqGraph(RegionGraph[RequestKey]):
    """Recordings by request bucket; regions are recorded with the rest, unless they are always eager."""

    kind: ClassVar[str] = "request"

    def bucket(self, requests: int, *, q_width: int, split: bool = False) -> int | None:
        """The request bucket that holds a step, if it is recorded."""
        size = self.ladder.ceil(requests)
        if size is None or RequestKey(size, q_width, split) not in self:
            return None
        return size

    def breaks_at(self, region: EagerRegion) -> bool:
        """Whether the region may never be recorded."""
        return region.always_eager
