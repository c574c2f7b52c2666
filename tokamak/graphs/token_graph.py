"""Which forwards are recorded by token count? Steps with prefill rows: every eager region is a break."""

from __future__ import annotations

from typing import ClassVar

from tokamak.graphs.region import EagerRegion
from tokamak.graphs.region_graph import RegionGraph


class TokenGraph(RegionGraph[int]):
    """Recordings by token bucket: with b breaks, b + 1 segments and b live region calls between them."""

    kind: ClassVar[str] = "token"

    def bucket(self, tokens: int) -> int | None:
        """The token bucket that holds a step, if it is recorded."""
        size = self.ladder.ceil(tokens)
        return size if size in self else None

    def breaks_at(self, region: EagerRegion) -> bool:
        """Every region is a break."""
        return True


class DecoderGraph(TokenGraph):
    """A token graph of late layers that run on the tail rows of each request, keyed by tail rows.

    It has a ladder, a manifest and a pool of its own, and runs after the token graph of the early layers in
    the same step: what crosses between the two crosses in outlets.
    """

    kind: ClassVar[str] = "decoder"
