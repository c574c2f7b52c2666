"""Do late layers of a rank run for the newest rows of prompts alone, from recordings and eagerly, and change nothing?"""

from __future__ import annotations

import pytest

from tests.support.shapes import a_row
from tests.support.tiny_v4 import SMALL, a_v4_1
from tests.support.wired_rank import Driver, Peer, WiredRank, a_prompt, a_rank
from tokamak.core.plan import StepPlan
from tokamak.layers.attention.tail import TailBuffers
from tokamak.layers.build import Build
from tokamak.layers.model import Model

LATE = 1 + 3 * 3
"""Rows that late layers run for: windows of 4 rows, three layers."""
LONG, SHORT = 24, 7

SIZES = {"req_graph_sizes": (1, 2), "token_graph_sizes": (4, 16)}


def narrow(build: Build) -> Model:
    """A V4.1 whose windows are small."""
    return a_v4_1(build, **{**SMALL, "sliding_window": 4})


def requests(driver: Driver, late: int) -> dict[str, list[int]]:
    """The tokens of a long prompt in chunks beside two that are short; late layers run for `late` rows of each."""
    for at, (name, length) in enumerate([("long", LONG), ("short", SHORT), ("old", SHORT)]):
        driver.add(name, a_prompt(length, at), first_late=max(0, length - late))
    driver.step({"old": SHORT})
    driver.step({"long": 10}, ["old"])
    driver.step({"long": 8, "short": SHORT}, ["old"])
    driver.step({"long": 6}, ["old", "short"])
    for _ in range(5):
        driver.step({}, ["long", "old"])
    return {name: driver.end(name) for name in ("long", "short", "old")}


@pytest.fixture(scope="module")
def recorded() -> WiredRank:
    """A rank with recordings of all graphs, every replay of which is compared."""
    return a_rank(narrow, poison_pad_rows=True, verify_graphs_rate=1.0, **SIZES)


@pytest.fixture(scope="module")
def whole() -> dict[str, list[int]]:
    """What a rank gives whose late layers run for all rows."""
    return requests(Driver(a_rank(narrow, graphs="off").runner), late=LONG)


def late_rows(rank: WiredRank) -> int:
    """Rows that late layers have run for so far, without padding."""
    return rank.runner.tally.late.scheduled_tokens


@pytest.mark.parametrize(
    "options",
    [{"graphs": "off"}, None, {**SIZES, "token_graph_eager_pad": True}],
    ids=["eager", "recorded", "padded"],
)
def test_cut_prompts_give_the_tokens_of_whole_ones(whole, recorded, options):
    rank = recorded if options is None else a_rank(narrow, **options)
    before = late_rows(rank)

    found = requests(Driver(rank.runner), late=LATE)

    assert found == whole
    # Beside the prompts, decode rows of the three steps they share.
    assert late_rows(rank) - before == LATE + 2 * SHORT + 4
    assert rank.runner.check.failures == 0


def test_a_chunk_in_front_of_the_tail_runs_no_late_layer_and_gives_nothing(recorded):
    rank, driver = recorded, Driver(recorded.runner)
    tally, check = rank.runner.tally, rank.runner.check
    driver.add("long", a_prompt(LONG, 1), first_late=LONG - LATE)
    steps, checks = tally.late.steps, check.checks
    early, late = (graph.report().replays for graph in (rank.graphs[0], rank.decoder))

    result = driver.step({"long": 14})

    assert result.rows[0].token_ids == ()
    assert (tally.late.steps, rank.decoder.report().replays) == (steps, late)
    assert rank.graphs[0].report().replays == early + 1
    # There is nothing to compare.
    assert check.checks == checks
    driver.step({"long": 10})
    assert tally.late.steps == steps + 1
    assert rank.decoder.report().replays == late + 1
    assert (check.checks, check.failures) == (checks + 1, 0)
    driver.step({}, ["long"])
    # GR-33: steps of decode rows alone run whole.
    assert tally.late.steps == steps + 1


@pytest.mark.parametrize("pads", [True, False])
def test_a_rank_without_tail_rows_runs_late_layers_beside_one_that_has_some(whole, pads):
    """GR-34: both run the bucket of the larger tail, or their own rows and one where there is none."""
    peer = Peer()
    options = {"token_graph_eager_pad": True, **SIZES} if pads else {"graphs": "off"}
    rank = a_rank(narrow, exchange=peer, **options)
    driver, late = Driver(rank.runner), rank.runner.tally.late
    driver.add("long", a_prompt(LONG, 0), first_late=LONG - LATE)
    before = (late.steps, late.scheduled_tokens, late.running_tokens)

    peer.other = a_row(prefill=(9,))
    assert rank.runner.step(StepPlan.empty(90)) is not None
    assert late.steps == before[0]
    peer.other = a_row(prefill=(9,), tail=9)
    driver.step({"long": 14})

    running = 16 if pads else 1
    assert late.steps == before[0] + 1
    assert late.scheduled_tokens == before[1]
    assert late.running_tokens == before[2] + running
    peer.other = a_row()
    driver.step({"long": 10})
    for _ in range(5):
        driver.step({}, ["long"])
    assert driver.end("long") == whole["long"]


def test_a_fault_in_what_is_handed_over_is_found_by_verification(recorded, monkeypatch):
    monkeypatch.setattr(TailBuffers, "hand_over", lambda *given: None)

    verdicts = recorded.wired.verifier.verify()

    sizes = [verdict.bucket for verdict in verdicts if verdict.graph == "decoder"]
    assert sizes == [4, 4, 4, 16, 16, 16]
    assert {verdict.graph for verdict in verdicts if not verdict.ok} == {"decoder"}


def test_late_recordings_are_reported_and_have_a_pool_of_their_own(recorded):
    tokens, decoder, requests, _ = recorded.runner.recorder.reports()

    kinds = [report.kind for report in (tokens, decoder, requests)]
    assert kinds == ["token", "decoder", "request"]
    assert decoder.buckets == (16, 4)
    assert decoder.pool_bytes > 0
    stages = recorded.model.stages()
    assert stages is not None
    assert tokens.segments == 2 * (len(stages.early_regions().names) + 1)
    assert decoder.segments == 2 * (len(stages.late_regions().names) + 1)
