"""How is a forward recorded at a size, and run again? As segments, with live calls of regions between them.

`ReqGraph` and `TokenGraph` differ in their keys and in which regions break the recording; the rest is
here. What leaves a recording leaves through its outlet, a buffer that is written inside the recording:
nobody outside reads the pool, so that all buckets may share it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from tokamak.core.context import StepContext, installed
from tokamak.core.inputs import StepInputs
from tokamak.errors import (
    BucketNotRecorded,
    FatalError,
    HandoffShape,
    LateBuffer,
    NestedRecording,
    PoisonedGraph,
)
from tokamak.graphs.backend import GraphBackend, Segment
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.recorder import RegionCall, SegmentRecorder, collector_off
from tokamak.graphs.region import EagerRegion, Manifest, begin_forward
from tokamak.graphs.streams import SideStreams

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One bucket."""

    entries: tuple[Segment | RegionCall, ...]
    outlet: Tensor
    backend: GraphBackend
    seconds: float

    @property
    def segments(self) -> list[Segment]:
        """The recorded stretches, in order."""
        return [entry for entry in self.entries if not isinstance(entry, RegionCall)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What a graph object has recorded."""

    kind: str
    name: str
    buckets: tuple[Hashable, ...]
    seconds: float
    pool_bytes: int
    segments: int
    """Of all buckets together."""
    replays: int
    native: bool
    """Whether replays run no PyTorch op from Python, but for the copy into the outlet."""


class _Thread(threading.local):
    recording: str | None = None


_THREAD = _Thread()


class RegionGraph(Generic[K]):
    """Recordings of one forward, by key, in one pool."""

    kind: ClassVar[str]

    def __init__(
        self,
        name: str,
        ladder: Ladder,
        backend_factory: Callable[[], GraphBackend],
        manifest: Manifest,
        streams: SideStreams,
        buffers: StaticBuffers,
        *,
        pools: Literal["per_graph", "per_bucket"] = "per_graph",
    ) -> None:
        self.name = name
        self.ladder = ladder
        self.manifest = manifest
        self.before_capture: list[Callable[[K], None]] = []
        self.after_capture: list[Callable[[K], None]] = []
        self.before_replay: list[Callable[[K], None]] = []
        self._backend_factory = backend_factory
        self._streams = streams
        self._buffers = buffers
        self._pools = pools
        self._backends: dict[K | None, GraphBackend] = {}
        self._recordings: dict[K, Recorded] = {}
        self._outlet: Tensor | None = None
        self._failure: BaseException | None = None
        self._replays = 0

    def breaks_at(self, region: EagerRegion) -> bool:
        """Whether a region ends the recorded segment."""
        raise NotImplementedError

    def __contains__(self, key: object) -> bool:
        """Whether a bucket can be replayed."""
        return key in self._recordings

    def outlet(self, key: K) -> Tensor:
        """Where a recorded bucket leaves its result, [rows, ...]; a KeyError if it is not recorded."""
        return self._recordings[key].outlet

    def buckets(self) -> tuple[K, ...]:
        """What is recorded, in order of recording."""
        return tuple(self._recordings)

    def open_outlets(self, like: Tensor, rows: int) -> None:
        """Make the buffer results leave through, for up to `rows` rows of `like`; before any recording.

        Raises:
            LateBuffer: while a graph is recorded.
        """
        self._outlet = self._buffers.make(
            f"{self.name} outlet", (rows, *like.shape[1:]), like.dtype, like.device
        )

    def record(self, key: K, forward: Callable[[StepInputs], Tensor], ctx: StepContext) -> Tensor:
        """Run a forward once as it is and once recorded; returns the outlet with its result [rows, ...].

        The installed context and all it points to must be worst cases of the bucket at their final
        addresses. After an error nothing is recorded under the key, and other recordings stay valid.

        Raises:
            NestedRecording: this thread records already.
            PoisonedGraph: a replay failed before.
            RegionMismatch: the forward met other regions than the manifest lists.
            UnjoinedSideStream: a segment ended, or the forward, with a fork open.
            LateBuffer: the outlet is missing or too small, or the forward asked for a persistent buffer.
            HostReadInRecording: a segment read numbers back to the host.
        """
        self._refuse_if_poisoned()
        began = time.perf_counter()
        backend = self._backend_of(key)
        with self._alone(key), installed(ctx), self._streams_cleared_on_error():
            begin_forward(ctx)
            forward(ctx.inputs)
            self._streams.check_forward_end()
            for hook in self.before_capture:
                hook(key)
            # The warm-up has filled the derived tables; the recording must fill them itself.
            begin_forward(ctx)
            recorder = SegmentRecorder(self.breaks_at, backend, self._streams)
            with collector_off(), self._buffers.sealed(), recorder.active():
                outlet = self._hand_out(forward(ctx.inputs))
            self.manifest.compare(recorder.met, graph=f"{self.kind} graph {self.name!r}")
            self._streams.check_forward_end()
            for hook in self.after_capture:
                hook(key)
        seconds = time.perf_counter() - began
        self._recordings[key] = Recorded(tuple(recorder.entries), outlet, backend, seconds)
        logger.debug(
            "Recorded bucket %s of %s graph %r in %.2f s: %d segments, %d pool bytes.",
            key, self.kind, self.name, seconds, len(self._recordings[key].segments), self.pool_bytes(),
        )  # fmt: skip
        return outlet

    def replay(self, key: K, ctx: StepContext) -> Tensor:
        """Run a bucket over the inputs of a step; returns the outlet [rows, ...], until the next run.

        Raises:
            BucketNotRecorded: nobody recorded the key.
            PoisonedGraph: the replay failed, or one before it did.
        """
        self._refuse_if_poisoned()
        recorded = self._recordings.get(key)
        if recorded is None:
            raise BucketNotRecorded(
                f"{self.kind} graph {self.name!r} has no bucket {key}",
                hint=f"recorded are {', '.join(map(str, self._recordings)) or 'none'}",
            )
        if _THREAD.recording is not None:
            raise NestedRecording(
                f"bucket {key} of {self.name!r} was replayed while {_THREAD.recording} is recorded",
                hint="run one graph after the other, with outlets between",
            )
        with installed(ctx):
            begin_forward(ctx)
            for hook in self.before_replay:
                hook(key)
            self._replays += 1
            try:
                self._run(recorded)
                self._streams.check_forward_end()
            except BaseException as error:
                self._failure = error
                self._streams.forget()
                if isinstance(error, FatalError) or not isinstance(error, Exception):
                    raise
                raise self._poisoned(error) from error
        return recorded.outlet

    def forget(self, key: K) -> None:
        """Drop a bucket; its pool memory serves later recordings."""
        self._recordings.pop(key, None)
        self._backends.pop(key, None)

    def pool_bytes(self) -> int:
        """Bytes of all pools of this graph object."""
        return sum(backend.pool_bytes() for backend in self._backends.values())

    def poison(self) -> None:
        """Fill free pool memory with NaN: for tests and debugging, between runs."""
        for backend in self._backends.values():
            backend.poison()

    def report(self) -> GraphReport:
        """What is recorded, how long it took and what it holds."""
        recordings = self._recordings.values()
        return GraphReport(
            kind=self.kind,
            name=self.name,
            buckets=self.buckets(),
            seconds=sum(recorded.seconds for recorded in recordings),
            pool_bytes=self.pool_bytes(),
            segments=sum(len(recorded.segments) for recorded in recordings),
            replays=self._replays,
            native=bool(recordings) and all(_is_native(recorded) for recorded in recordings),
        )

    def _run(self, recorded: Recorded) -> None:
        backend, streams = recorded.backend, self._streams
        for entry in recorded.entries:
            if isinstance(entry, RegionCall):
                with streams.within_region(entry.region.name):
                    entry.region.run(entry.args)
            else:
                backend.replay(entry)

    def _hand_out(self, result: Tensor) -> Tensor:
        """Copy a result into the outlet, inside the recording."""
        rows, outlet = result.shape[0], self._outlet
        if outlet is None or outlet.shape[0] < rows:
            size = "none" if outlet is None else f"one of {outlet.shape[0]}"
            raise LateBuffer(
                f"{self.name!r} needs an outlet of {rows} rows and has {size}",
                hint="open outlets at the largest bucket before recording",
            )
        if result.shape[1:] != outlet.shape[1:] or result.dtype != outlet.dtype:
            raise HandoffShape(
                f"{self.name!r} gave {list(result.shape)} of {result.dtype}; its outlet is "
                f"{list(outlet.shape)} of {outlet.dtype}",
                hint="open outlets like the forward's result",
            )
        return outlet[:rows].copy_(result)

    def _backend_of(self, key: K) -> GraphBackend:
        owner = key if self._pools == "per_bucket" else None
        if owner not in self._backends:
            self._backends[owner] = self._backend_factory()
        return self._backends[owner]

    def _refuse_if_poisoned(self) -> None:
        if self._failure is not None:
            raise self._poisoned(self._failure) from self._failure

    def _poisoned(self, failure: BaseException) -> PoisonedGraph:
        return PoisonedGraph(
            f"{self.kind} graph {self.name!r} failed in a replay: {type(failure).__name__}: {failure}",
            hint="its buffers cannot be trusted; end this process",
        )

    @contextmanager
    def _alone(self, key: K) -> Iterator[None]:
        """One recording at a time in this thread."""
        if _THREAD.recording is not None:
            raise NestedRecording(
                f"bucket {key} of {self.name!r} was to be recorded while {_THREAD.recording} is",
                hint="record one graph after the other",
            )
        _THREAD.recording = f"bucket {key} of {self.name!r}"
        try:
            yield
        finally:
            _THREAD.recording = None

    @contextmanager
    def _streams_cleared_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._streams.forget()
            raise


def _is_native(recorded: Recorded) -> bool:
    """Whether the copy into the outlet is the only op that runs from Python."""
    return sum(segment.op_count for segment in recorded.segments) <= 1
