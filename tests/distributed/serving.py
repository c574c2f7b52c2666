"""A rank's program of tests: a whole runner with its own scheduler and requests, beside a peer with others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support.factory import a_request
from tests.support.ranks import Rank
from tests.support.tiny import VOCAB_TOKENS
from tokamak.cache.arena import Arena
from tokamak.cache.holdings import Holdings
from tokamak.config.engine import EngineConfig
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.plan import StepPlan, StepShape
from tokamak.engine.configure import configure
from tokamak.engine.scheduler import Scheduler
from tokamak.errors import GraphError
from tokamak.graphs.token_graph import TokenGraph
from tokamak.runner import assemble as assemble_module
from tokamak.runner import runner as runner_module
from tokamak.runner import wiring
from tokamak.runner.dummy import NULL_SLOT
from tokamak.runner.exchange import COLUMNS, Rows
from tokamak.runner.graph_cost import GraphCost
from tokamak.runner.group_exchange import GroupExchange
from tokamak.runner.inputs import InputArena
from tokamak.runner.shape import ForwardMode, RunningTable

STEPS = 120
BLOCK_TOKENS = 4

OPTIONS: dict[str, object] = {
    "dtype": "fp32",
    "threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": BLOCK_TOKENS,
    "num_blocks_override": 64,
    "req_graph_sizes": "1,2,4",
    "token_graph_sizes": "8,16",
}
WITHOUT_GRAPHS = {"req_graph_sizes": "auto", "token_graph_sizes": "auto"}


class Arrival(NamedTuple):
    """A request that reaches a rank before a step."""

    step: int
    prompt_ids: tuple[int, ...]
    max_tokens: int


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    """Token ids without a special one; a longer prompt of a seed begins with the shorter."""
    return tuple(np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, 64)[:tokens].tolist())


STREAMS: tuple[dict[str, Arrival], ...] = (
    {
        "alone": Arrival(0, prompt(1, 6), 12),
        "again": Arrival(16, prompt(2, 20), 9),
        "one of three": Arrival(26, prompt(3, 5), 10),
        "two of three": Arrival(26, prompt(4, 7), 6),
        "three of three": Arrival(27, prompt(5, 9), 8),
        "after a rest": Arrival(60, prompt(6, 3), 2),
    },
    {
        "prompt only": Arrival(3, prompt(7, 30), 1),
        "same beginning": Arrival(9, prompt(7, 34), 10),
        "beside three": Arrival(30, prompt(8, 17), 14),
        "prompt again": Arrival(62, prompt(7, 36), 5),
    },
)
"""By rank. Between them a rank idles beside a prefill and beside a decode, and both beside each other."""

LAST_ARRIVAL = max(arrival.step for stream in STREAMS for arrival in stream.values())


@dataclass(slots=True)
class Told:
    """What a rank saw."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    """What the rank itself had to do in every step."""
    sizes: list[tuple[object, ...]] = field(default_factory=list)
    """What must be equal on all ranks, of every step."""
    touched: list[int] = field(default_factory=list)
    """Steps without work after which another block than the null block was different."""
    recorded: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Buckets by graph, at the end."""
    exchanges: int = 0
    """Steps, those of a warm-up included, and the introduction."""
    cost: str = ""
    """Where the cost of recordings came from."""


class NotedArena(Arena):
    """The arena that was made last."""

    last: NotedArena

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        NotedArena.last = self

    def blocks(self) -> list[Tensor]:
        """Copies of all blocks but the null block."""
        return [view[1:].clone() for layers in self.views().values() for view in layers]


class NotedMode(ForwardMode):
    """Notes what every step settles on."""

    told: Told

    @classmethod
    def settle(cls, rows: Rows, *, rank: int, table: RunningTable, **graphs) -> StepShape:
        shape = super().settle(rows, rank=rank, table=table, **graphs)
        cls.told.exchanges += 1
        if rows[0, COLUMNS["seq"]] >= 0:
            requests = shape.running_requests if shape.q_width else None
            size = (shape.mode, shape.why, requests, shape.q_width, tuple(table.view.tolist()))
            cls.told.sizes.append(size)
        return shape


def is_idle(plan: StepPlan) -> bool:
    """Whether a plan is an idle rank's and no warm-up's or recording's."""
    return plan.seq >= 0 and bool((plan.slots == NULL_SLOT).all())


class ScratchForIdle(InputArena):
    """Historic fault: an idle rank publishes into a copy, and the recording goes on reading the real buffers."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._scratch = InputArena(*args, **settings)
        self._is_idle = False

    def stage(self, plan, shape):
        self._is_idle = is_idle(plan)
        if self._is_idle:
            self._scratch.stage(plan, shape)
        else:
            super().stage(plan, shape)

    def publish(self):
        if self._is_idle:
            self._scratch.publish()
        else:
            super().publish()

    def fill(self, plan, shape):
        return self._scratch.fill(plan, shape) if self._is_idle else super().fill(plan, shape)

    @property
    def sampled(self):
        return self._scratch.sampled if self._is_idle else super().sampled


class OneFails(TokenGraph):
    """Cannot record the largest bucket."""

    def record(self, key, forward, ctx):
        if key == self.ladder.buckets[-1]:
            raise GraphError(f"bucket {key} fails on purpose")
        return super().record(key, forward, ctx)


def serve(
    rank: Rank,
    model: Path,
    cache: Path,
    options: Mapping[str, object],
    arena: type[InputArena] = InputArena,
    exchange: GroupExchange | None = None,
) -> Told:
    """Run all steps of a rank's stream beside its peer's."""
    told = NotedMode.told = Told(exchanges=1)
    wiring.Arena = NotedArena
    wiring.InputArena = arena
    runner_module.ForwardMode = NotedMode
    config = config_of(model, cache, options)
    assembled = assemble_module.assemble(config, exchange or rank.exchange())
    told.cost = assembled.start.cost.source
    scheduler = Scheduler(
        assembled.start.config.scheduler,
        Holdings(
            assembled.start.groups,
            block_tokens=BLOCK_TOKENS,
            blocks=assembled.start.memory.group_blocks,
            reuse=True,
        ),
        config.model.max_model_len,
    )
    step_by_step(assembled.runner, scheduler, STREAMS[rank.rank], told)
    told.recorded = {report.name: report.buckets for report in assembled.runner.recorder.reports()}
    return told


def step_by_step(
    runner: runner_module.ModelRunner,
    scheduler: Scheduler,
    stream: Mapping[str, Arrival],
    told: Told,
) -> None:
    """Every rank takes part in every step until nobody has work and nobody comes."""
    for seq in range(STEPS):
        for name, arrival in stream.items():
            if arrival.step == seq:
                scheduler.add(
                    replace(
                        a_request(name, prompt=arrival.prompt_ids, max_tokens=arrival.max_tokens),
                        stop_ids=frozenset(),
                    )
                )
        own = scheduler.plan()
        plan = StepPlan.empty(seq) if own is None else replace(own, seq=seq)
        told.kinds.append(kind_of(plan))
        before = NotedArena.last.blocks() if own is None else []
        in_flight = runner.step(plan)
        if own is None:
            after = NotedArena.last.blocks() if before else []
            if not all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
                told.touched.append(seq)
            if in_flight is None and seq > LAST_ARRIVAL:
                return
            continue
        assert in_flight is not None, f"step {seq} had rows and was not run"
        for progress in scheduler.commit(replace(in_flight.take(), seq=own.seq)):
            tokens = told.tokens.setdefault(progress.request.request_id, [])
            tokens.extend(progress.row.token_ids)
    raise AssertionError(f"there is work after {STEPS} steps")


def kind_of(plan: StepPlan) -> str:
    """What a rank has to do."""
    if not plan.scheduled_requests:
        return "idle"
    return "prefill" if plan.prefill_rows else "decode"


def config_of(model: Path, cache: Path, options: Mapping[str, object]) -> EngineConfig:
    """A rank's config, its costs and kernels kept in `cache`."""
    os.environ[CACHE_VARIABLE] = str(cache)
    return configure(EngineOptions(model=str(model), **{**OPTIONS, **options}))


def serve_with_a_failing_recording(
    rank: Rank, model: Path, cache: Path, options: Mapping[str, object]
) -> Told:
    """Rank 1 cannot record the largest token bucket."""
    if rank.rank == 1:
        wiring.TokenGraph = OneFails
    return serve(rank, model, cache, options)


def serve_with_one_cost_saved(
    rank: Rank,
    model: Path,
    cache: Path,
    options: Mapping[str, object],
    kind: type[GroupExchange] = GroupExchange,
) -> Told:
    """Only rank 0 knows from an earlier start what recordings take."""
    own = cache / f"rank {rank.rank}"
    if rank.rank == 0:
        planned = assemble_module.plan_rank(config_of(model, own, options))
        known = GraphCost(bytes_per_bucket=1 << 20, bytes_per_row=4096, source="measured")
        assemble_module.save_cost(planned.cost_path, known)
    return serve(rank, model, own, options, exchange=rank.exchange(kind=kind, timeout_s=5.0))


class DecidesAlone(GroupExchange):
    """Historic fault: whether a rank measures is its own matter, and not the first vote's."""

    _has_voted = False

    def vote(self, ok, /):
        if self._has_voted:
            return super().vote(ok)
        self._has_voted = True
        return ok


def serve_with_other_sizes(rank: Rank, model: Path, cache: Path) -> Told:
    """Rank 1 was started with another token ladder."""
    sizes = "8" if rank.rank else "8,16"
    return serve(rank, model, cache, {"graphs": "startup", "token_graph_sizes": sizes})
