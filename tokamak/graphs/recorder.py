"""How does one forward become segments and region calls? By running it once, with the recorder listening."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokamak.errors import RegionMismatch
from tokamak.graphs.backend import GraphBackend, Segment
from tokamak.graphs.region import RECORDING, EagerRegion
from tokamak.graphs.streams import SideStreams


@dataclass(frozen=True, slots=True, eq=False)
class RegionCall:
    """A region that runs live between two segments; pool tensors among its arguments are aliases."""

    region: EagerRegion
    args: tuple[Any, ...]


class SegmentRecorder:
    """Divides one forward into segments and region calls."""

    def __init__(
        self,
        breaks_at: Callable[[EagerRegion], bool],
        backend: GraphBackend,
        streams: SideStreams,
    ) -> None:
        self.met: list[str] = []
        self.entries: list[Segment | RegionCall] = []
        self._breaks_at = breaks_at
        self._backend = backend
        self._streams = streams
        self._number = 0
        self._inside: str | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record what the block computes."""
        self._begin()
        RECORDING.recorder = self
        try:
            yield
            RECORDING.recorder = None
            self._end()
        except Exception as error:
            self._backend.abort_segment()
            meaning = self._backend.meaning_of(error)
            if meaning is error:
                raise
            raise meaning from error
        except BaseException:
            self._backend.abort_segment()
            raise
        finally:
            RECORDING.recorder = None

    def meet(self, region: EagerRegion, args: tuple[Any, ...]) -> None:
        """Run a region inside the segment, or between this segment and the next."""
        if self._inside is not None:
            self._meet_nested(region, args)
            return
        self.met.append(region.name)
        self._inside = region.name
        try:
            if not self._breaks_at(region):
                region.run(args)
                return
            self._break(region, args)
        finally:
            self._inside = None

    def _break(self, region: EagerRegion, args: tuple[Any, ...]) -> None:
        self._end()
        kept = tuple(
            self._backend.detached(arg) if isinstance(arg, Tensor) else arg for arg in args
        )
        self.entries.append(RegionCall(region, kept))
        try:
            with self._streams.within_region(region.name):
                region.run(args)
        finally:
            # After an error too: whoever entered the region from a segment leaves it into one.
            self._begin()

    def _meet_nested(self, region: EagerRegion, args: tuple[Any, ...]) -> None:
        """A region called by a region's body is part of it."""
        if region.always_eager and self._backend.capturing():
            raise RegionMismatch(
                f"region {region.name!r} is always eager and was called by region {self._inside!r}, "
                "whose body is recorded",
                hint="call it from the forward, or make the outer region always eager too",
            )
        region.body(*args)

    def _begin(self) -> None:
        self._streams.begin_segment(self._number)
        self._backend.begin_segment()

    def _end(self) -> None:
        self._streams.check_segment_end(self._number)
        self.entries.append(self._backend.end_segment())
        self._number += 1


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect garbage now and not inside: it could free tensors of another pool, or wait for the device.

    What is old stays, as walking it costs a tenth of a second a bucket; whoever records many collects all once.
    """
    gc.collect(1)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
