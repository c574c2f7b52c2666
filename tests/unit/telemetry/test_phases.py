"""Is every phase of a request timed once, whatever ends it?"""

from __future__ import annotations

import pytest

from tokamak.telemetry.phases import PHASE_BOUNDS_S, RequestPhases


def seconds(phases: RequestPhases) -> dict[str, float]:
    return {name: totals.sum_s for name, totals in phases.totals().items()}


def closed(phases: RequestPhases) -> list[int]:
    return [totals.counts[-1] for totals in phases.totals().values()]


def test_a_request_waits_computes_its_prompt_and_decodes():
    phases = RequestPhases()

    phases.queued("a", 1.0)
    phases.admitted(["a"], 1.5)
    phases.prefilled(["a"], 3.5)
    phases.ended(["a"], 7.5)

    assert seconds(phases) == {"queue": 0.5, "prefill": 2.0, "decode": 4.0}
    assert closed(phases) == [1, 1, 1]
    assert phases.open_spans == 0


def test_a_request_that_is_computed_again_stays_in_its_phase():
    phases = RequestPhases()
    phases.queued("a", 0.0)
    phases.admitted(["a"], 1.0)
    phases.prefilled(["a"], 2.0)

    phases.admitted(["a"], 3.0)
    phases.prefilled(["a"], 4.0)
    phases.ended(["a"], 5.0)

    assert seconds(phases) == {"queue": 1.0, "prefill": 1.0, "decode": 3.0}
    assert closed(phases) == [1, 1, 1]


@pytest.mark.parametrize(("steps", "expected"), [(0, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])])
def test_a_request_that_ends_early_closes_the_phase_it_is_in(steps, expected):
    phases = RequestPhases()
    phases.queued("a", 0.0)
    for move in (phases.admitted, phases.prefilled)[:steps]:
        move(["a"], 1.0)

    phases.ended(["a"], 2.0)
    phases.ended(["a", "never seen"], 3.0)

    assert closed(phases) == expected
    assert phases.open_spans == 0


def test_counts_are_running_sums_over_the_bounds():
    phases = RequestPhases()
    for name, waited in (("a", 0.003), ("b", 0.2), ("c", 1e6)):
        phases.queued(name, 0.0)
        phases.admitted([name], waited)

    counts = dict(zip([*PHASE_BOUNDS_S, "all"], phases.totals()["queue"].counts, strict=True))

    assert (counts[0.001], counts[0.005], counts[0.25], counts[1800.0], counts["all"]) == (
        0,
        1,
        2,
        2,
        3,
    )
