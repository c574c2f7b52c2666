"""Does a step give the oracle's tokens however it runs, wait once, and fail alone or for all as it must?"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tests.support.factory import a_request
from tests.support.oracle import Oracle
from tests.support.tiny import VOCAB_TOKENS, write_checkpoint
from tokamak.cache.holdings import Holdings
from tokamak.config.engine import EngineConfig
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.context import StepContext, current
from tokamak.core.plan import Mode, StepPlan, StepResult, StepShape
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.executor import InProcessExecutor
from tokamak.engine.messages import AddRequest, RequestUpdate
from tokamak.engine.scheduler import Progress, Scheduler
from tokamak.errors import (
    FatalError,
    NoContext,
    PoisonedGraph,
    StatusTakenTwice,
    StatusTooEarly,
)
from tokamak.graphs.sim import SimBackend
from tokamak.layers.attention.gqa import GroupedQueryAttention
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.build import Build
from tokamak.models.llama.llama import Llama
from tokamak.runner.assemble import Rank, assemble
from tokamak.runner.forward import Forward
from tokamak.runner.inputs import InputArena
from tokamak.runner.previous import Previous
from tokamak.runner.results import InFlightResult
from tokamak.telemetry.spans import SPANS

BLOCK_TOKENS = 4
STEP_TOKENS = 24
TURNS = 400

SIZES = {"req_graph_sizes": "1,2,4", "token_graph_sizes": "8,16,24", "graph_backend": "sim"}
GRAPHS: dict[str, dict[str, object]] = {
    "startup": {"graphs": "startup", **SIZES},
    "serving": {"graphs": "serving", **SIZES},
    "on-demand": {"graphs": "on-demand", **SIZES},
    "off": {"graphs": "off"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module", autouse=True)
def _kept_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs and kernels of these tests, and of no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


class NotedExecutor(InProcessExecutor):
    """Keeps every plan, and how many waits there had been when it was launched."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []
        self.waits_at_launch: list[int] = []

    def launch(self, plan):
        self.plans.append(plan)
        self.waits_at_launch.append(self.rank.runner.waits.host_waits)
        return super().launch(plan)


def config_of(folder: Path, graphs: str, **changes: object) -> EngineConfig:
    asked: dict[str, object] = {
        "dtype": "fp32",
        "threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_model_len": 96,
        "block_size": BLOCK_TOKENS,
        "num_blocks_override": 36,
        **GRAPHS[graphs],
        **changes,
    }
    return configure(EngineOptions(model=str(folder), **asked))


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., tuple[EngineCore, NotedExecutor]]]:
    """Starts an engine."""
    cores: list[EngineCore] = []

    def make(graphs: str, **changes: object) -> tuple[EngineCore, NotedExecutor]:
        executor = NotedExecutor(config_of(folder, graphs, **changes))
        cores.append(EngineCore(executor.rank.start.config, executor))
        return cores[-1], executor

    yield make
    for core in cores:
        core.close()


class Case(NamedTuple):
    """A request of the golden run."""

    turn: int
    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Golden:
    """Requests by name, and what each gets from the oracle."""

    cases: Mapping[str, Case]
    tokens: Mapping[str, list[int]]


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    """Arrivals over 60 turns, prompts up to four steps long; every third request ends early at a token of its own."""
    oracle, numbers = Oracle(folder), np.random.default_rng(7)
    cases: dict[str, Case] = {}
    tokens: dict[str, list[int]] = {}
    for at in range(16):
        prompt = numbers.integers(20, VOCAB_TOKENS - 10, int(numbers.integers(2, 70))).tolist()
        max_tokens = int(numbers.integers(6, 24))
        expected = oracle.generate(prompt, max_tokens).token_ids
        stop_ids: list[int] = []
        if at % 3 == 0:
            end = next(i for i in (3, 2, 1, 0) if expected[i] not in expected[:i])
            stop_ids, expected = [expected[end]], expected[: end + 1]
        name = f"r{at}"
        cases[name] = Case(4 * at, prompt, max_tokens, stop_ids)
        tokens[name] = expected
    return Golden(cases, tokens)


@dataclass
class Ran:
    """What clients and the loop saw."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    """Updates of requests that had ended."""
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    """Of every turn: steps committed, waits made, and waits made before its launch."""

    def note(self, update: RequestUpdate) -> None:
        if update.request_id in self.ends:
            self.late.append(update.request_id)
        self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
        if update.finish_reason is not None:
            self.ends[update.request_id] = update.finish_reason


def an_add(name: str, case: Case) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_ids=case.prompt_ids,
        params=SamplingParams(temperature=0),
        max_tokens=case.max_tokens,
        stop_ids=case.stop_ids,
        sibling=0,
        priority=0,
        cache_salt="",
    )


def run(core: EngineCore, executor: NotedExecutor, cases: Mapping[str, Case]) -> Ran:
    """Turn the loop until every request has come and gone."""
    ran = Ran()
    last = max(case.turn for case in cases.values())
    for turn in range(TURNS):
        for name, case in cases.items():
            if case.turn == turn:
                core.add(an_add(name, case))
        before, launched = core.stats(), len(executor.plans)
        for update in core.step():
            ran.note(update)
        after = core.stats()
        early = [waits - before.host_waits for waits in executor.waits_at_launch[launched:]]
        ran.waits.append(
            (after.steps - before.steps, after.host_waits - before.host_waits, sum(early))
        )
        if turn > last and not core.has_work:
            return ran
    raise AssertionError(f"there is work after {TURNS} turns")


def sampled_rows(plans: list[StepPlan]) -> Counter[str]:
    """How many tokens were sampled for each request, wanted or not."""
    return Counter(plan.request_ids[row] for plan in plans for row in plan.sampled_rows)


@pytest.mark.parametrize("needs_status", [False, True], ids=["", "needs-status"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_golden_run_gives_the_tokens_of_the_oracle_with_one_wait_a_step(
    start, golden, monkeypatch, graphs, needs_status
):
    monkeypatch.setattr(Llama, "needs_status", needs_status)
    core, executor = start(graphs)

    ran = run(core, executor, golden.cases)

    assert ran.tokens == golden.tokens
    stats, report = core.stats(), core.report()
    assert stats.steps >= 50
    assert stats.preemptions > 0
    kinds = {(bool(p.prefill_rows), p.prefill_rows < p.scheduled_requests) for p in executor.plans}
    assert kinds == {(True, False), (True, True), (False, True)}
    assert any(not p.final_chunk[: p.prefill_rows].all() for p in executor.plans)
    # A wait for every step that was committed, in its turn, after the launch of the next.
    assert {(waits - steps, early) for steps, waits, early in ran.waits} == {(0, 0)}
    replayed = {mode for mode in Mode if mode is not Mode.EAGER and report.modes[mode].steps}
    assert graphs not in ("startup", "serving") or replayed == {
        Mode.REQUEST_GRAPH,
        Mode.TOKEN_GRAPH,
    }
    assert graphs != "off" or not replayed


def buckets_of(core: EngineCore) -> dict[str, list[int]]:
    return {graph.name: graph.recorded for graph in core.report().graphs}


def test_sizes_are_recorded_one_by_one_while_there_is_no_work(start):
    core, _ = start("serving")
    before = buckets_of(core)

    pieces = 1
    while core.work_ahead():
        pieces += 1

    expected = buckets_of(start("startup")[0])
    assert not any(before.values())
    assert buckets_of(core) == expected
    assert pieces == len(expected["decode"]) + len(expected["prefill"])


def test_rows_of_requests_that_ended_a_step_ago_never_reach_a_client(start, golden):
    core, executor = start("off")

    ran = run(core, executor, golden.cases)

    stopped = [name for name, case in golden.cases.items() if case.stop_ids]
    sampled = sampled_rows(executor.plans)
    assert [sampled[name] - len(ran.tokens[name]) for name in stopped] == [1] * len(stopped)
    assert {ran.ends[name] for name in stopped} == {FinishReason.STOP}
    assert not ran.late
    assert ran.tokens == golden.tokens


def test_a_ghost_that_is_delivered_is_found(start, golden, monkeypatch):
    original = Scheduler.commit

    def commit(self: Scheduler, result: StepResult) -> list[Progress]:
        planned = self._in_flight[result.seq]
        ghosts = [
            Progress(request=request, row=row, stop_id=None)
            for request, row in zip(planned.requests, result.rows, strict=True)
            if request.finish_reason is not None
        ]
        return original(self, result) + ghosts

    monkeypatch.setattr(Scheduler, "commit", commit)
    core, executor = start("off")

    ran = run(core, executor, golden.cases)

    assert ran.late
    assert ran.tokens != golden.tokens


def test_a_start_that_can_record_nothing_serves_eagerly(start, golden, monkeypatch, tmp_path):
    def reads_to_the_host(self, *, token_graph: bool) -> list[str]:
        return ["attention"]

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Build, "unrecordable", reads_to_the_host)
    core, executor = start("startup")

    ran = run(core, executor, {"r1": golden.cases["r1"]})

    assert ran.tokens == {"r1": golden.tokens["r1"]}
    assert executor.rank.start.cost.source == "default"
    reason = "attention reads numbers to the host"
    assert executor.rank.runner.recorder.off == {"decode": reason, "prefill": reason}


# --- one step, part by part ---------------------------------------------------------------------


@dataclass
class Noted:
    """What the parts of steps did, in order, on a device that answers when it is waited for."""

    rank: Rank
    steps: list[list[str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.steps[-1].append(what)


@pytest.fixture
def noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A rank whose parts note their calls."""
    found = Noted(assemble(config_of(folder, "startup", num_blocks_override=80)))
    found.steps.append([])

    def noting(owner: type, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(self, *args):
            found.note(what)
            return original(self, *args)

        monkeypatch.setattr(owner, name, call)

    for name in ("stage", "publish", "fill"):
        noting(InputArena, name, name)
    noting(AttnBuilder, "prepare", "attn")
    noting(Forward, "run", "forward")
    noting(InFlightResult, "status", "status")

    def launch(cls, plan, sampled, prompt_logprobs, waits):
        return cls(
            plan,
            sampled,
            prompt_logprobs,
            token_ids=sampled.token_ids,
            arrival=lambda: found.note("wait"),
            waits=waits,
        )

    monkeypatch.setattr(InFlightResult, "launch", classmethod(launch))
    return found


def a_scheduler_of(rank: Rank) -> Scheduler:
    """A scheduler over a rank's blocks, with three requests waiting."""
    config = rank.start.config
    holdings = Holdings(
        rank.start.groups,
        block_tokens=BLOCK_TOKENS,
        blocks=rank.start.memory.group_blocks,
        reuse=False,
    )
    scheduler = Scheduler(config.scheduler, holdings, config.model.max_model_len)
    for at, tokens in enumerate((5, 30, 9)):
        scheduler.add(a_request(f"r{at}", prompt=tokens, max_tokens=6))
    return scheduler


def run_ahead(noted: Noted) -> int:
    """Run all requests, one step ahead: a step is taken when the next is launched. Returns how many steps."""
    scheduler, launched = a_scheduler_of(noted.rank), deque[InFlightResult]()
    steps = 0
    while True:
        noted.steps.append([])
        plan = scheduler.plan()
        if plan is not None:
            result = noted.rank.runner.step(plan)
            assert result is not None
            launched.append(result)
            steps += 1
        if len(launched) > 1 or (launched and plan is None):
            noted.note("take")
            scheduler.commit(launched.popleft().take())
        elif plan is None:
            return steps


LAUNCHED = ["stage", "publish", "fill"]


def test_without_a_reader_of_the_status_the_wait_comes_behind_the_launches(noted):
    before = noted.rank.runner.waits.host_waits

    steps = run_ahead(noted)

    assert noted.rank.runner.waits.host_waits - before == steps
    assert steps > 6
    middle = [*LAUNCHED, "attn", "forward", "take", "wait"]
    assert noted.steps[2:steps] == [middle] * (steps - 2)


def test_with_a_reader_the_wait_comes_between_the_fill_and_the_metadata(noted, monkeypatch):
    monkeypatch.setattr(Llama, "needs_status", True)
    before = noted.rank.runner.waits.host_waits

    steps = run_ahead(noted)

    assert noted.rank.runner.waits.host_waits - before == steps
    middle = [*LAUNCHED, "status", "wait", "attn", "forward", "take"]
    assert noted.steps[2:steps] == [middle] * (steps - 2)


@pytest.mark.parametrize("part", LAUNCHED)
def test_a_part_before_the_launch_that_reads_the_status_ends_the_step(noted, monkeypatch, part):
    """PREP-1: the status is out of reach until the fill is launched."""
    original = getattr(InputArena, part)
    previous: Previous = noted.rank.runner._previous

    def reading(self, *args):
        previous.take(StepPlan.empty(0))
        return original(self, *args)

    monkeypatch.setattr(Llama, "needs_status", True)
    monkeypatch.setattr(InputArena, part, reading)

    with pytest.raises(StatusTooEarly, match="before its inputs are launched"):
        run_ahead(noted)


def test_a_second_reader_of_the_status_ends_the_step(noted, monkeypatch):
    original = AttnBuilder.prepare
    previous: Previous = noted.rank.runner._previous

    def reading(self, plan, shape, inputs, rejected):
        previous.take(plan)
        return original(self, plan, shape, inputs, rejected)

    monkeypatch.setattr(Llama, "needs_status", True)
    monkeypatch.setattr(AttnBuilder, "prepare", reading)

    with pytest.raises(StatusTakenTwice, match="step 0"):
        run_ahead(noted)


def installed_now() -> StepContext | None:
    try:
        return current()
    except NoContext:
        return None


def test_a_context_is_installed_for_the_forward_alone(noted, monkeypatch):
    found: dict[str, set[bool]] = {"attn": set(), "region": set(), "after": set()}
    prepare, attend = AttnBuilder.prepare, GroupedQueryAttention.attend

    def noting_prepare(self, *args):
        found["attn"].add(installed_now() is not None)
        return prepare(self, *args)

    def noting_attend(self, q, out, context):
        found["region"].add(installed_now() is context)
        return attend(self, q, out, context)

    monkeypatch.setattr(AttnBuilder, "prepare", noting_prepare)
    monkeypatch.setattr(GroupedQueryAttention, "attend", noting_attend)
    scheduler = a_scheduler_of(noted.rank)
    while (plan := scheduler.plan()) is not None:
        result = noted.rank.runner.step(plan)
        found["after"].add(installed_now() is not None)
        scheduler.commit(result.take())

    assert found == {"attn": {False}, "region": {True}, "after": {False}}


def test_no_stage_of_a_step_takes_an_attribute(noted, monkeypatch):
    stages: list[Any] = []
    original = Forward.run

    def keeping(self, context):
        stages.extend([context, context.shape, context.attn])
        return original(self, context)

    monkeypatch.setattr(Forward, "run", keeping)
    scheduler = a_scheduler_of(noted.rank)
    plan = scheduler.plan()
    in_flight = noted.rank.runner.step(plan)
    result = in_flight.take()
    stages += [plan, in_flight.status(), result, result.rows[0]]

    assert {StepContext, StepShape, StepPlan, StepResult} <= {type(stage) for stage in stages}
    for stage in stages:
        fields = msgspec.structs.fields if isinstance(stage, msgspec.Struct) else dataclasses.fields
        for name in ("later", *(each.name for each in fields(stage))):
            with pytest.raises((AttributeError, TypeError)):
                setattr(stage, name, None)


# --- faults -------------------------------------------------------------------------------------

ONE = Case(0, list(range(30, 40)), 6, [])


def run_out(core: EngineCore) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    while core.has_work:
        updates += core.step()
    return updates


@pytest.mark.parametrize("mode", [Mode.TOKEN_GRAPH, Mode.REQUEST_GRAPH])
def test_a_replay_that_fails_ends_the_engine_and_not_its_requests_alone(start, monkeypatch, mode):
    core, _ = start("startup")
    original = Forward.run

    def failing(self, entry):
        raise ValueError("the device said no")

    def run_forward(self, context):
        if context.shape.mode is not mode:
            return original(self, context)
        with monkeypatch.context() as patch:
            patch.setattr(SimBackend, "replay", failing)
            return original(self, context)

    core.add(an_add("doomed", ONE))
    with monkeypatch.context() as patch:
        patch.setattr(Forward, "run", run_forward)
        with pytest.raises(FatalError, match="failed in a replay: ValueError: the device said no"):
            run_out(core)

    # Nor does it serve anybody else.
    core.add(an_add("next", ONE))
    with pytest.raises(PoisonedGraph):
        run_out(core)


def test_an_eager_step_that_fails_ends_its_requests_alone_and_names_them(
    start, golden, monkeypatch, caplog
):
    core, executor = start("off")
    attend = GroupedQueryAttention.attend

    def failing(self, q, out, context):
        if context.shape.scheduled_tokens == len(ONE.prompt_ids):
            raise ValueError("the device said no")
        return attend(self, q, out, context)

    monkeypatch.setattr(GroupedQueryAttention, "attend", failing)
    core.add(an_add("doomed", ONE))

    (failure,) = run_out(core)
    case = golden.cases["r1"]
    ran = run(core, executor, {"r1": case._replace(turn=0)})

    assert failure.finish_reason is FinishReason.ERROR
    assert "ValueError: the device said no" in failure.error
    assert "1 prefill and 0 decode rows, 10 tokens, of requests doomed" in caplog.text
    assert ran.tokens == {"r1": golden.tokens["r1"]}
    assert core.stats().free_blocks == core.stats().total_blocks


# --- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs_status", [False, True])
def test_every_part_is_timed_once_a_step_within_the_steps_own_time(
    start, monkeypatch, needs_status
):
    monkeypatch.setattr(Llama, "needs_status", needs_status)
    core, executor = start("startup")
    spans = executor.rank.runner.spans
    before = {name: totals.counts[-1] for name, totals in spans.totals().items()}
    first, began = spans.steps, time.perf_counter_ns()

    core.add(an_add("one", ONE))
    run_out(core)

    elapsed_ns = time.perf_counter_ns() - began
    steps = core.stats().steps
    counts = {name: t.counts[-1] - before[name] for name, t in spans.totals().items()}
    absent = {"draft"} if needs_status else {"draft", "wait_status"}
    assert counts == {name: 0 if name in absent else steps for name in SPANS}
    assert spans.steps - first == steps == ONE.max_tokens
    rows = spans.recent_ns()[-steps:]
    # Delivery runs beside the next step; the rest comes one after the other.
    own = [at for at, name in enumerate(SPANS) if name not in {*absent, "deliver"}]
    assert (rows[:, own] > 0).all()
    # The first row too, though recordings came before it.
    assert rows[:, own].sum() <= elapsed_ns
