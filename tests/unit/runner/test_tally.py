"""Are steps counted by mode and reason, and is padding and exchange time?"""

from __future__ import annotations

from tests.support.shapes import Recorded, a_row, settle
from tokamak.core.plan import Mode
from tokamak.runner.tally import EXCHANGE_BOUNDS_S, StepTally


def test_padding_is_counted_for_each_mode():
    tally = StepTally()
    prefill, _ = settle([a_row(prefill=(40,))], 0, token_graph=Recorded(64))
    decode, _ = settle([a_row(decode=3)], 0, req_graph=Recorded(4))

    tally.count(prefill, None)
    tally.count(decode, None)
    tally.count(decode, None)

    assert tally.modes[Mode.TOKEN_GRAPH].waste == 64 / 40
    assert tally.modes[Mode.REQUEST_GRAPH].waste == 8 / 6
    assert tally.modes[Mode.REQUEST_GRAPH].steps == 2
    assert tally.modes[Mode.EAGER].waste == 1.0


def test_padding_of_steps_without_work_of_their_own_has_no_measure():
    tally = StepTally()
    idle, _ = settle([a_row(), a_row(decode=3)], 0, req_graph=Recorded(4))

    tally.count(idle, 1e-4)

    assert tally.modes[Mode.REQUEST_GRAPH].waste == float("inf")


def test_reasons_have_shares_of_all_steps():
    tally = StepTally()
    above, _ = settle([a_row(decode=9)], 0, req_graph=Recorded(4))
    bucket, _ = settle([a_row(decode=3)], 0, req_graph=Recorded(4))

    for shape in (above, bucket, bucket, bucket):
        tally.count(shape, None)

    assert tally.share("eager:above-ladder") == 0.25
    assert tally.share("bucket") == 0.75
    assert tally.share("eager:off") == 0.0
    assert StepTally().share("bucket") == 0.0


def test_exchange_times_fall_in_bins_and_add_up():
    tally = StepTally()
    shape, _ = settle([a_row(decode=1)], 0)

    for seconds in (10e-6, EXCHANGE_BOUNDS_S[0], 300e-6, 5.0):
        tally.count(shape, seconds)
    tally.count(shape, None)

    assert tally.exchange.bins[0] == 2
    assert tally.exchange.bins[3] == 1
    assert tally.exchange.bins[-1] == 1
    assert tally.exchange.exchanges == sum(tally.exchange.bins) == 4
    assert abs(tally.exchange.total_s - 5.00036) < 1e-9
