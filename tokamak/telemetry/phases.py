"""How long does a request wait, compute its prompt, and decode? A span a phase, each closed exactly once.

`queue` ends when a step first has the request, `prefill` with the step of its final chunk, whatever the row's place
among others, `decode` with the request. A request that ends early closes the phase it is in; one that is computed
again after a preemption stays in its phase.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from tokamak.telemetry.spans import SpanTotals

PHASES = ("queue", "prefill", "decode")

PHASE_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds; one more bucket holds the rest."""

_QUEUE, _PREFILL, _DECODE = range(3)


class RequestPhases:
    """The phases of all requests of an engine. Times are given, in seconds of one clock."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, float]] = {}
        self._counts = [[0] * (len(PHASE_BOUNDS_S) + 1) for _ in PHASES]
        self._sums_s = [0.0] * len(PHASES)

    @property
    def open_spans(self) -> int:
        """Requests in some phase; 0 when none is unfinished."""
        return len(self._open)

    def queued(self, request_id: str, at_s: float) -> None:
        """A request begins to wait."""
        assert request_id not in self._open, f"{request_id} is in a phase already"
        self._open[request_id] = (_QUEUE, at_s)

    def admitted(self, request_ids: Iterable[str], at_s: float) -> None:
        """Requests are in a step for the first time, or again."""
        for request_id in request_ids:
            self._move(request_id, _QUEUE, at_s)

    def prefilled(self, request_ids: Iterable[str], at_s: float) -> None:
        """The step of these requests' final chunks is done."""
        for request_id in request_ids:
            self._move(request_id, _PREFILL, at_s)

    def ended(self, request_ids: Iterable[str], at_s: float) -> None:
        """Requests are over, in whatever phase; unknown ones ended before."""
        for request_id in request_ids:
            phase, began_s = self._open.pop(request_id, (None, 0.0))
            if phase is not None:
                self._close(phase, at_s - began_s)

    def totals(self) -> dict[str, SpanTotals]:
        """Every phase since the start; counts are running sums over PHASE_BOUNDS_S, then all."""
        return {
            name: SpanTotals(counts=tuple(np.cumsum(counts).tolist()), sum_s=sum_s)
            for name, counts, sum_s in zip(PHASES, self._counts, self._sums_s, strict=True)
        }

    def _move(self, request_id: str, phase: int, at_s: float) -> None:
        """Close a request's phase and begin the next, if it is in that phase."""
        now, began_s = self._open.get(request_id, (None, 0.0))
        if now == phase:
            self._close(phase, at_s - began_s)
            self._open[request_id] = (phase + 1, at_s)

    def _close(self, phase: int, seconds: float) -> None:
        self._counts[phase][bisect_left(PHASE_BOUNDS_S, seconds)] += 1
        self._sums_s[phase] += seconds
