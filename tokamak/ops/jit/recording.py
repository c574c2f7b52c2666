"""Can a sequence of kernel calls run again without Python? Recorded once, replayed as one native call.

A small model's step makes hundreds of kernel calls; each costs microseconds of Python whose code and data
the weights keep pushing out of the caches. A recording keeps the calls with their arguments. Its three
promises: inputs are refilled in the tensors that were there at recording; every number in between lives in
memory the recording owns; and a recording that met any other PyTorch op on the way is refused.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokamak.ops.jit.calls import JOB_WORDS, LISTENING, Calls, Job

HARMLESS_OPS = frozenset(
    {"aten::empty", "aten::view", "aten::slice", "aten::select", "aten::detach", "aten::alias"}
)
"""PyTorch ops that compute nothing: a replay need not repeat them."""


class _Witness(TorchDispatchMode):
    """Notes every PyTorch op that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; guarding against that would import the compiler, three seconds."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run the op and note its name."""
        name = func._schema.name
        if name not in HARMLESS_OPS:
            self.met.add(name)
        return func(*args, **(kwargs or {}))


class Recording:
    """Kernel calls that can run again, and the tensor their result is in."""

    def __init__(self, calls: Calls, result: Tensor) -> None:
        self.result = result
        self._buffers = _settle_buffers(calls, result)
        self._jobs = calls.jobs
        words = [
            word
            for job in calls.jobs
            for word in (
                job.work,
                ctypes.addressof(job.arguments),
                job.threads,
                len(job.arguments) - 1,
            )
        ]
        assert len(words) == JOB_WORDS * len(calls.jobs)
        self._words = (ctypes.c_int64 * len(words))(*words)

    @property
    def buffer_bytes(self) -> int:
        """Memory for the numbers in between."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def replay(self) -> Tensor:
        """Run the calls again; the result is the same tensor with new numbers."""
        self._jobs[0].replayer.replay(self._words)
        return self.result


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None, frozenset[str]]:
    """Run something and keep its kernel calls.

    Returns its result; a recording, or None if it did more than call kernels; and the names of the
    PyTorch ops it called beside them.
    """
    calls = Calls()
    witness = _Witness()
    before = LISTENING.calls
    LISTENING.calls = calls
    try:
        with witness:
            result = run()
    finally:
        LISTENING.calls = before
    met = frozenset(witness.met)
    if met or not calls.jobs:
        return result, None, met
    return result, Recording(calls, result), met


@dataclass(slots=True)
class _Span:
    """A tensor made on the way: its memory, and the jobs between which it holds something."""

    start: int
    size: int
    first: int
    last: int


def _settle_buffers(calls: Calls, result: Tensor) -> list[Tensor]:
    """Move the tensors made on the way into few buffers: those that are never alive together share one."""
    spans = _spans(calls)
    kept = result.data_ptr()
    frees_at: list[int] = []
    sizes: list[int] = []
    seats: list[tuple[_Span, int]] = []
    for span in sorted(spans, key=lambda span: span.first):
        if span.start <= kept < span.start + span.size:
            continue
        free = [at for at, until in enumerate(frees_at) if until < span.first]
        if free:
            seat = min(free, key=lambda at: (sizes[at] < span.size, abs(sizes[at] - span.size)))
            sizes[seat] = max(sizes[seat], span.size)
        else:
            seat = len(sizes)
            sizes.append(span.size)
            frees_at.append(0)
        frees_at[seat] = span.last
        seats.append((span, seat))
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    moved = {span.start: buffers[seat].data_ptr() for span, seat in seats}
    _rewrite(calls.jobs, [span for span, _ in seats], moved)
    return [*buffers, result]


def _spans(calls: Calls) -> list[_Span]:
    """Where each tensor lies and which jobs read or write it; unused ones are left out."""
    spans = sorted(
        (
            _Span(tensor.data_ptr(), tensor.nbytes, -1, -1)
            for tensor in calls.tensors
            if tensor.nbytes
        ),
        key=lambda span: span.start,
    )
    starts = [span.start for span in spans]
    for at, job in enumerate(calls.jobs):
        for integer in job.arguments:
            span = _holder(spans, starts, integer)
            if span is not None:
                span.first = at if span.first < 0 else span.first
                span.last = at
    return [span for span in spans if span.first >= 0]


def _rewrite(jobs: list[Job], spans: list[_Span], moved: dict[int, int]) -> None:
    """Replace addresses in the old tensors by those in the new buffers."""
    spans = sorted(spans, key=lambda span: span.start)
    starts = [span.start for span in spans]
    for job in jobs:
        for at, integer in enumerate(job.arguments):
            span = _holder(spans, starts, integer)
            if span is not None:
                job.arguments[at] = moved[span.start] + integer - span.start


def _holder(spans: list[_Span], starts: list[int], address: int) -> _Span | None:
    """The tensor an address lies in."""
    at = bisect_right(starts, address) - 1
    if at >= 0 and address < starts[at] + spans[at].size:
        return spans[at]
    return None
