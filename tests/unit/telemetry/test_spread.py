"""Does the histogram of tokens say what the library's own says?"""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tokamak.telemetry.spread import Spread

BOUNDS = (0.001, 0.5, 1, 30)
VALUES = ((0.0004, 1), (0.001, 2), (0.7, 1), (1.0, 3), (29.9, 1), (31.0, 1))


def text(registry):
    """Without the time it was made, which is the library's own addition."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_counts_and_sums_read_as_those_of_the_library():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spread("seconds", "Between tokens.", BOUNDS)
    ours.register(spread)
    histogram = Histogram("seconds", "Between tokens.", buckets=BOUNDS, registry=theirs)

    for value, times in VALUES:
        spread.add(value, times)
        for _ in range(times):
            histogram.observe(value)

    assert text(ours) == text(theirs)
