"""How is counted what comes with every token? By a histogram that one thread adds to, for a fraction of a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Spread(Collector):
    """A histogram without labels, which is no safer than a list: only one thread may add."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        """Count by upper bounds, in rising order; a value at a bound is below it."""
        self._name, self._description = name, description
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """The counts so far, as Prometheus wants them: each with all below it."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(
            self._name, self._description, buckets=buckets, sum_value=self._sum
        )
