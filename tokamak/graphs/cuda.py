"""How is a segment recorded on a GPU? As a CUDA graph, in the back end's pool, on the process's one capture stream.

The allocator keeps the memory of a pool by stream: a stream per bucket would hold the sum of the buckets
where one stream holds the largest.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tokamak.errors import GraphError, HostReadInRecording

logger = logging.getLogger(__name__)

FREE_BYTE = 0xFF
_INTEGERS = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32), 8: ("<i8", torch.int64)}  # fmt: skip
"""By item size: what foreign memory is imported as, whatever it holds."""

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Captures that did not end: the allocator may ask them still."""


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which everything is recorded."""
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class CudaSegment:
    """A CUDA graph."""

    graph: torch.cuda.CUDAGraph
    empty: bool
    pool: torch.cuda.MemPool
    """Outlives the graph."""

    @property
    def kernel_runs(self) -> int:
        """One launch, if there is anything to launch."""
        return 0 if self.empty else 1

    @property
    def op_count(self) -> int:
        """No op runs from Python."""
        return 0


class CudaBackend:
    """Records and replays segments on a GPU; one private pool."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise GraphError(
                f"the cuda back end records on a GPU, not on {device}",
                hint="use graphs.backend=sim",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        with torch.cuda.device(self._device):
            self._pools = [torch.cuda.MemPool()]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outer: torch.cuda.Stream | None = None
        self._ranges: list[tuple[int, int]] = []
        self._ranges_at = -1

    def begin_segment(self) -> None:
        """Capture what this thread launches from now on."""
        assert self._graph is None, "a segment is being recorded already"
        outer, stream = torch.cuda.current_stream(self._device), capture_stream(self._device)
        stream.wait_stream(outer)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(stream)
        try:
            graph.capture_begin(
                pool=self._pools[-1].id,  # pyright: ignore[reportArgumentType]
                capture_error_mode="thread_local",
            )
        except RuntimeError:
            torch.cuda.set_stream(outer)
            raise
        self._graph, self._outer = graph, outer

    def end_segment(self) -> CudaSegment:
        """The segment; a capture computes nothing, so it is launched once."""
        graph = self._graph
        assert graph is not None, "no segment is being recorded"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        self._leave()
        is_empty = [" is empty" in str(warning.message) for warning in caught]
        for warning, expected in zip(caught, is_empty, strict=True):
            if not expected:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        segment = CudaSegment(graph, any(is_empty), self._pools[-1])
        self.replay(segment)
        return segment

    def abort_segment(self) -> None:
        """Give up the capture of this back end, if there is one."""
        graph = self._graph
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError as error:
            # The error that broke the capture is on its way to the caller; this one says no more.
            logger.debug("A broken capture ended with: %s", error)
            self._quit_pool(graph)
        finally:
            self._leave()

    def capturing(self) -> bool:
        """Whether a segment is being recorded."""
        return self._graph is not None

    def replay(self, segment: CudaSegment) -> None:
        """Launch a segment on the current stream."""
        if not segment.empty:
            segment.graph.replay()

    def pool_bytes(self) -> int:
        """Bytes of the pool's segments, as the allocator lists them."""
        return sum(end - start for start, end in self._segments())

    def detached(self, tensor: Tensor) -> Tensor:
        """A pool tensor as foreign memory, without a hold on it; any other tensor itself."""
        if tensor.numel() == 0 or not self._owns(tensor.data_ptr()):
            return tensor
        code, integer = _INTEGERS[tensor.dtype.itemsize]
        strides = tuple(step * tensor.dtype.itemsize for step in tensor.stride())
        memory = _Memory(tensor.data_ptr(), tuple(tensor.shape), strides, code)
        alias = torch.as_tensor(memory, device=self._device)
        assert alias.dtype == integer
        assert alias.data_ptr() == tensor.data_ptr()
        return alias.view(tensor.dtype)

    def poison(self) -> None:
        """Fill pool memory that nothing holds with NaN, on the current stream."""
        for segment in self._snapshot():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    memory = _Memory(block["address"], (block["size"],), (1,), "|u1")
                    torch.as_tensor(memory, device=self._device).fill_(FREE_BYTE)

    def meaning_of(self, error: Exception) -> Exception:
        """A wait for the device inside a capture is a host read; other errors are themselves."""
        if isinstance(error, RuntimeError) and "captur" in str(error):
            return HostReadInRecording(
                f"a recorded segment waited for {self._device}, or called what cannot be captured: "
                f"{str(error).splitlines()[0]}",
                hint="do it in an eager region, or compute with tensors of a fixed shape",
            )
        return error

    def _leave(self) -> None:
        """Go back to the compute stream."""
        outer = self._outer
        assert outer is not None
        self._graph = self._outer = None
        torch.cuda.set_stream(outer)
        outer.wait_stream(capture_stream(self._device))

    def _quit_pool(self, broken: torch.cuda.CUDAGraph) -> None:
        """Take another pool for later segments: a capture that did not end leaves its pool in use."""
        _BROKEN.append(broken)
        pool = self._pools[-1].id
        self._pools.append(torch.cuda.MemPool())
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
            torch._C._cuda_releasePool(self._device.index, pool)
        except RuntimeError as error:
            logger.debug("The allocator had left the pool already: %s", error)

    def _owns(self, address: int) -> bool:
        """Whether an address lies in the pool."""
        reserved = torch.cuda.memory_reserved(self._device)
        if reserved != self._ranges_at:
            # The pool grows by segments of the device; while their sum stands still, so does it.
            self._ranges, self._ranges_at = list(self._segments()), reserved
        return any(start <= address < end for start, end in self._ranges)

    def _segments(self) -> Iterator[tuple[int, int]]:
        for segment in self._snapshot():
            yield segment["address"], segment["address"] + segment["total_size"]

    def _snapshot(self) -> list[dict]:
        ids = {tuple(pool.id) for pool in self._pools}
        snapshots = [torch.cuda.memory_snapshot(pool.id) for pool in self._pools]
        return [s for snapshot in snapshots for s in snapshot if tuple(s["segment_pool_id"]) in ids]


class _Memory:
    """Memory somebody else owns, as `torch.as_tensor` reads it."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], code: str
    ) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": code,
            "version": 2,
        }
