"""A rank's program of tests: steps with random arrivals through plan, decision, idle plan and a fake model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.support.ranks import LedgerGroup, Rank
from tests.support.shapes import DRAFTS, NoGraph, Recorded
from tokamak.core.plan import Int32s, Mode, StepPlan, StepShape
from tokamak.runner.dummy import dummy_plan, idle_plan
from tokamak.runner.exchange import COLUMNS, NO_DEMAND, Demand, Rows, rank_row
from tokamak.runner.shape import ForwardMode, RunningTable

LAYERS = 2
WIDTH = 4
Q_WIDTH = 2

TOKEN_GRAPH = Recorded(16, 32, 64, missing=(32,))
LATE_GRAPH = NoGraph()
REQ_GRAPH = Recorded(1, 2, 4, 8, missing=(2,))


class SmallestForIdle(ForwardMode):
    """Historic fault: an idle rank prefills at the smallest bucket."""

    @classmethod
    def settle(cls, rows: Rows, *, rank: int, table: RunningTable, **graphs) -> StepShape:
        shape = super().settle(rows, rank=rank, table=table, **graphs)
        if shape.dummy and shape.mode is Mode.TOKEN_GRAPH:
            tokens = table.view.tolist()
            tokens[rank] = graphs["token_graph"].ladder.buckets[0]
            table.fill(tokens)
            return replace(shape, running_tokens=tokens[rank])
        return shape


class EarlyReturn(ForwardMode):
    """Historic fault: an empty batch returns before the exchange."""

    @classmethod
    def decide(
        cls, plan: StepPlan, *, exchange, eager_demand: Demand, tail_rows: int, **settings
    ) -> StepShape:
        if not plan.scheduled_requests:
            rows = np.array([rank_row(plan)] * exchange.ranks, dtype=np.int32)
            return cls.settle(rows, rank=exchange.rank, **settings)
        return super().decide(
            plan, exchange=exchange, eager_demand=eager_demand, tail_rows=tail_rows, **settings
        )


class LocalSearch(ForwardMode):
    """Historic fault: every rank looks up the bucket of its own size."""

    @classmethod
    def settle(cls, rows: Rows, *, rank: int, **settings) -> StepShape:
        shape = super().settle(rows, rank=rank, **settings)
        if shape.mode is Mode.TOKEN_GRAPH:
            own = rows.copy()
            own[:, COLUMNS["scheduled_tokens"]] = max(shape.scheduled_tokens, 1)
            return super().settle(own, rank=rank, **settings)
        return shape


def kinds_of_step(seed: int, seq: int, ranks: int) -> list[str]:
    """What each rank does, in a random order.

    Of 3 or more ranks one is idle, one decodes and in most steps one prefills; 2 ranks take turns. Every third
    step is decode alone, and in every 50th nobody has work.
    """
    chance = random.Random(f"{seed} {seq}")
    if seq % 50 == 49:
        return ["idle"] * ranks
    if seq % 3 == 2:
        kinds = ["idle"] + ["decode"] * (ranks - 1)
    elif ranks == 2:
        kinds = [["prefill", "decode"], ["idle", "prefill"]][seq % 3]
    else:
        kinds = ["idle", "prefill", "decode"]
        kinds += [chance.choice(["idle", "prefill", "decode", "mixed"]) for _ in range(ranks - 3)]
    chance.shuffle(kinds)
    return kinds


def plan_of_step(kind: str, chance: random.Random, seq: int) -> StepPlan:
    """A plan of this kind; now and then larger than the largest bucket."""
    prefill = chance.choice([1, 5, 17, 40, 70]) if kind in ("prefill", "mixed") else 0
    decode = chance.choice([1, 2, 3, 7, 9]) if kind in ("decode", "mixed") else 0
    plan = dummy_plan(prefill_tokens=prefill, decode_rows=decode, q_width=Q_WIDTH, seq=seq)
    rows = plan.scheduled_requests
    return replace(
        plan,
        request_ids=tuple(f"r{row}" for row in range(rows)),
        slots=np.arange(1, rows + 1, dtype=np.int32),
    )


def run_steps(rank: Rank, seed: int, steps: int, mode: type[ForwardMode]) -> list[tuple[str, str]]:
    """Run steps of random plans; returns (mode, why) of each, and the ledger has every collective."""
    chance = random.Random(f"{seed} of rank {rank.rank}")
    exchange = rank.exchange(timeout_s=8.0)
    table, late_table = RunningTable(rank.ranks), RunningTable(rank.ranks)
    seen: list[tuple[str, str]] = []
    for seq in range(steps):
        plan = plan_of_step(kinds_of_step(seed, seq, rank.ranks)[rank.rank], chance, seq)
        demand = chance.choice([NO_DEMAND] * 30 + [Demand.IMAGE])
        shape = mode.decide(
            plan,
            exchange=exchange,
            table=table,
            late_table=late_table,
            req_graph=REQ_GRAPH,
            token_graph=TOKEN_GRAPH,
            late_graph=LATE_GRAPH,
            policy=DRAFTS,
            eager_demand=demand,
            tail_rows=0,
        )
        seen.append((shape.mode, shape.why))
        if shape.running_requests == 0:
            continue
        own = idle_plan(shape, seq) if shape.dummy else plan
        fake_model(rank, own, shape, table.view)
    return seen


def fake_model(rank: Rank, plan: StepPlan, shape: StepShape, table: Int32s) -> None:
    """Layers that move all rows to all ranks and back; pad rows stay zero, real rows grow alike."""
    assert plan.scheduled_tokens <= shape.running_tokens
    hidden = torch.zeros(shape.running_tokens, WIDTH)
    hidden[: shape.scheduled_tokens] = 1.0
    for _ in range(LAYERS):
        hidden = hidden + fake_moe(rank, hidden, table)
    gain = (1 + rank.ranks * (rank.ranks + 1) // 2) ** LAYERS
    assert bool((hidden[: shape.scheduled_tokens] == gain).all())
    assert not hidden[shape.scheduled_tokens :].any()
    if shape.draft_requests:
        draft = torch.zeros(shape.draft_requests, WIDTH)
        move(rank.group, draft, [shape.draft_requests] * rank.ranks)


def fake_moe(rank: Rank, hidden: Tensor, table: Int32s) -> Tensor:
    """Every rank is an expert that multiplies by its number; the sum over experts comes back."""
    agreed = table.tolist()
    arrived = move(rank.group, hidden, agreed)
    mine = [len(hidden)] * rank.ranks
    back = rank.group.all_to_all(arrived * (rank.rank + 1), mine, agreed, agreed)
    return back.view(rank.ranks, len(hidden), WIDTH).sum(0)


def move(group: LedgerGroup, rows: Tensor, agreed: list[int]) -> Tensor:
    """Send all rows to all ranks, with buffers of the agreed sizes."""
    return group.all_to_all(rows.repeat(len(agreed), 1), agreed, [len(rows)] * len(agreed), agreed)
