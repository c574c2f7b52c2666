"""What does a rank tell its peers of a step, and what must be equal from the start?"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.support.factory import a_request, a_result, a_scheduler
from tokamak.core.plan import StepPlan
from tokamak.graphs.ladder import Ladder
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import (
    COLUMNS,
    Demand,
    LocalExchange,
    RankRow,
    config_hash,
    config_text,
    demand_names,
    rank_row,
)


def test_a_row_counts_what_was_scheduled_and_who_drafts():
    scheduler = a_scheduler(step_tokens=16)
    scheduler.add(a_request("first", prompt=5))
    scheduler.commit(a_result(scheduler.plan()))
    scheduler.add(a_request("second", prompt=3))
    scheduler.add(a_request("long", prompt=40))
    plan = scheduler.plan()

    row = rank_row(plan, Demand.IMAGE | Demand.HOST_READ)

    assert row == RankRow(
        seq=plan.seq,
        has_work=1,
        scheduled_tokens=16,
        scheduled_requests=3,
        prefill_rows=2,
        max_query=1,
        eager_demand=5,
        draft_rows=2,
        tail_rows=0,
        config_hash=0,
    )


def test_the_widest_decode_row_is_told():
    plan = dummy_plan(prefill_tokens=9, decode_rows=2, q_width=4)

    assert rank_row(plan).max_query == 4
    assert rank_row(dummy_plan(prefill_tokens=9, decode_rows=0)).max_query == 1


def test_a_plan_without_rows_has_no_work_and_a_place_in_the_group_s_step():
    row = rank_row(StepPlan.empty(12))

    assert row == RankRow(
        seq=12,
        has_work=0,
        scheduled_tokens=0,
        scheduled_requests=0,
        prefill_rows=0,
        max_query=1,
        eager_demand=0,
        draft_rows=0,
        tail_rows=0,
        config_hash=0,
    )


def test_a_lone_rank_hears_itself_and_agrees_with_itself():
    exchange = LocalExchange()
    row = rank_row(dummy_plan(prefill_tokens=3, decode_rows=0, seq=12))

    rows = exchange.gather_rows(row)

    assert rows.dtype == np.int32
    assert rows.tolist() == [list(row)]
    assert rows[0, COLUMNS["seq"]] == 12
    assert (exchange.ranks, exchange.rank, exchange.last_s) == (1, 0, None)
    assert exchange.vote(True)
    assert not exchange.vote(False)


def test_demands_are_shown_by_name():
    assert demand_names(Demand.IMAGE) == "image"
    assert demand_names(Demand.IMAGE | Demand.HOST_READ) == "image+host-read"


@pytest.mark.parametrize(
    ("ladders", "switches"),
    [
        ({"token_sizes": Ladder((64,))}, {"drafts": False}),
        ({"token_sizes": Ladder((64, 128))}, {"drafts": True}),
        ({"request_sizes": Ladder((64, 128))}, {"drafts": False}),
        ({"token_sizes": Ladder((64, 128))}, {"drafts": False, "verify": False}),
        ({"token_sizes": Ladder((64, 128))}, {"drafts": 0}),
    ],
)
def test_every_ladder_and_switch_changes_the_config_hash(ladders, switches):
    usual = config_hash({"token_sizes": Ladder((64, 128))}, {"drafts": False})

    assert config_hash(ladders, switches) != usual
    assert 0 < usual < 2**31


def test_the_config_hash_does_not_depend_on_the_order_of_settings():
    ladders = {"b": Ladder((1,)), "a": Ladder((2,))}
    switches = {"y": 1.5, "x": None}

    hashed = config_hash(ladders, switches)

    reversed_ = dict(reversed(ladders.items())), dict(reversed(switches.items()))
    assert hashed == config_hash(*reversed_)
    assert config_text(ladders, switches) == "a = [2]\nb = [1]\nx = null\ny = 1.5"


def test_another_process_hashes_a_config_alike():
    program = (
        "from tokamak.graphs.ladder import Ladder; from tokamak.runner.exchange import config_hash; "
        "import sys; print(config_hash({'t': Ladder((64, 128))}, {'drafts': True}), 'torch' in sys.modules)"
    )

    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()

    assert int(told[0]) == config_hash({"t": Ladder((64, 128))}, {"drafts": True})
    assert told[1] == "False"  # what ranks tell each other is known without torch
