"""What does a graph ask of a device? Segments that are recorded, replayed and share one private pool.

A back end knows no steps, no models and no buckets. One instance belongs to one graph object.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tokamak.graphs.cuda import CudaBackend
from tokamak.graphs.sim import SimBackend


class Segment(Protocol):
    """A recorded stretch of a forward."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to replay."""
        ...

    @property
    def kernel_runs(self) -> int:
        """Native calls of a replay."""
        ...

    @property
    def op_count(self) -> int:
        """PyTorch ops that a replay runs one by one from Python."""
        ...


class GraphBackend(Protocol):
    """Records and replays segments of one graph object."""

    def begin_segment(self) -> None:
        """Record what this thread computes from now on."""
        ...

    def end_segment(self) -> Segment:
        """The segment; what it computes is there, so that a region behind it reads real numbers."""
        ...

    def abort_segment(self) -> None:
        """Give up the segment that is being recorded, if any; the back end stays usable."""
        ...

    def capturing(self) -> bool:
        """Whether a segment is being recorded."""
        ...

    def replay(self, segment: Any) -> None:
        """Launch a segment of this back end again."""
        ...

    def pool_bytes(self) -> int:
        """Bytes the private pool has taken from the device."""
        ...

    def detached(self, tensor: Tensor) -> Tensor:
        """An alias of a pool tensor that does not hold its memory; any other tensor itself."""
        ...

    def poison(self) -> None:
        """Fill pool memory that nothing holds with NaN: what is read from it after a run shows."""
        ...

    def meaning_of(self, error: Exception) -> Exception:
        """What an error inside a segment means, or the error itself."""
        ...


def make_backend(kind: Literal["cuda", "sim"], device: torch.device) -> GraphBackend:
    """A back end with a pool of its own."""
    return CudaBackend(device) if kind == "cuda" else SimBackend(device)
