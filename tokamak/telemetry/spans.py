"""How long does each part of a step take on the host? Timers that are always on.

A span costs well under a microsecond. The last steps are kept one by one; all of them as histograms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

SPANS = (
    "stage", "publish", "fill", "wait_status", "attn", "install", "launch", "sample", "draft", "deliver",
)  # fmt: skip
"""The parts of a step, in the order they come."""

BOUNDS_S = (
    2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2, 1.0, 5.0,
)  # fmt: skip
"""Upper bounds of the histogram's buckets, in seconds; one more bucket holds the rest."""

KEPT_STEPS = 1024

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS_S)

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a profiler range of a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTotals:
    """One span since the start."""

    counts: tuple[int, ...]
    """How often it took at most each bound of BOUNDS_S, then how often in all: running sums."""
    sum_s: float


class Span:
    """A timer used again and again: `with span: ...`. One thread at a time, and not inside itself."""

    __slots__ = ("_at", "_began", "_counts", "_range", "_spans", "name", "sum_ns")

    def __init__(self, spans: Spans, name: str, at: int) -> None:
        self.name = name
        self.sum_ns = 0
        self._spans = spans
        self._at = at
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._range: AbstractContextManager[object] | None = None
        self._began = 0

    def __enter__(self) -> None:
        spans = self._spans
        if spans.is_profiling():
            self._range = spans.make_range(f"tokamak::{self.name}")
            self._range.__enter__()
        self._began = perf_counter_ns()

    def __exit__(self, *raised: object) -> None:
        elapsed_ns = perf_counter_ns() - self._began
        self.sum_ns += elapsed_ns
        self._counts[bisect_left(_BOUNDS_NS, elapsed_ns)] += 1
        self._spans.current[self._at] += elapsed_ns
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def totals(self) -> SpanTotals:
        """This span's histogram and sum."""
        sums = np.cumsum(self._counts).tolist()
        return SpanTotals(counts=tuple(sums), sum_s=self.sum_ns / 1e9)


def _never() -> bool:
    return False


class Spans:
    """The timers of one rank.

    Args:
        make_range: makes a profiler range; used while `is_profiling` says so, for names `tokamak::stage` etc.
        is_profiling: whether a profiler runs; asked at every span, so it must be cheap.
    """

    def __init__(
        self, make_range: Ranges | None = None, is_profiling: Callable[[], bool] = _never
    ) -> None:
        assert make_range is not None or is_profiling is _never, "profiling needs ranges"
        self.make_range: Ranges = make_range or _no_range
        self.is_profiling = is_profiling
        self.steps = 0
        """Steps ended so far."""
        self.current = [0] * len(SPANS)
        """Nanoseconds of each span in the step that runs."""
        self._by_name = {name: Span(self, name, at) for at, name in enumerate(SPANS)}
        self._kept = np.zeros((KEPT_STEPS, len(SPANS)), dtype=np.int64)

    def span(self, name: str) -> Span:
        """The timer of a part; a name not in SPANS is a KeyError."""
        return self._by_name[name]

    def end_step(self) -> None:
        """Keep the step's times and start with the next."""
        current = self.current
        self._kept[self.steps % KEPT_STEPS] = current
        self.steps += 1
        current[:] = [0] * len(current)

    def recent_ns(self) -> npt.NDArray[np.int64]:
        """The last steps, oldest first: nanoseconds by span. int64 [steps, spans], at most KEPT_STEPS."""
        if self.steps <= KEPT_STEPS:
            return self._kept[: self.steps].copy()
        return np.roll(self._kept, -(self.steps % KEPT_STEPS), axis=0)

    def totals(self) -> dict[str, SpanTotals]:
        """Every span since the start."""
        return {name: span.totals() for name, span in self._by_name.items()}


def _no_range(name: str) -> AbstractContextManager[object]:
    raise AssertionError(f"a range {name} was asked for and nobody can make one")
