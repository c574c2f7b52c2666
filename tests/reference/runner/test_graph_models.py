"""Does a rank that replays steps give what an eager rank gives, for every kind of model and every kind of step?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.graph_families import FAMILIES, LAYERS
from tests.support.shapes import a_row
from tests.support.tiny import llama_config, mistral_config, qwen3_config, write_checkpoint
from tests.support.wired_rank import (
    REQUEST_SIZES,
    TOKEN_SIZES,
    Driver,
    Peer,
    WiredRank,
    a_prompt,
    a_rank,
)
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.config.settle_graphs import compiled_kernels
from tokamak.core.plan import Mode, StepPlan
from tokamak.device.facts import cpu_facts
from tokamak.engine.configure import configure
from tokamak.errors import GraphError, RegionMismatch
from tokamak.graphs.region import RECORDING
from tokamak.graphs.region_graph import RegionGraph
from tokamak.graphs.request_graph import RequestKey
from tokamak.graphs.token_graph import TokenGraph
from tokamak.layers.attention import gqa
from tokamak.runner import record
from tokamak.runner.assemble import Rank, assemble
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import LocalExchange
from tokamak.runner.record import WANTED_STEPS, Recorder
from tokamak.runner.verify import edges

every_family = pytest.mark.parametrize("family", FAMILIES)
CHECKPOINTS = {"llama": llama_config(), "mistral": mistral_config(), "qwen3": qwen3_config()}


@pytest.fixture(autouse=True)
def _costs_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "costs"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every real family."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, config) for name, config in CHECKPOINTS.items()}


def a_started_rank(folder: Path, **options: object) -> Rank:
    """A rank as the engine starts it."""
    asked = {
        "dtype": "fp32",
        "threads": 1,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "graphs": "startup",
        "req_graph_sizes": (1, 2, 4),
        "token_graph_sizes": (4, 9),
        **options,
    }
    return assemble(configure(EngineOptions(model=str(folder), **asked)))


# Every bucket


@every_family
@pytest.mark.parametrize(
    ("pools", "threads"), [("per_graph", 1), ("per_graph", 2), ("per_bucket", 1)]
)
def test_every_bucket_replays_what_runs_eagerly_at_its_size_and_padded(family, pools, threads):
    """eager, eager at the same padding and replayed are the same numbers, at both edges of every bucket."""
    torch.set_num_threads(threads)
    rank = a_rank(FAMILIES[family], graph_pools=pools)

    verdicts = rank.wired.verifier.verify()

    start = rank.start
    cases = [("request", *edge) for edge in edges(start.request_ladder)]
    cases += [("token", *edge) for edge in edges(start.token_ladder)]
    cases += [("decoder", *edge) for edge in edges(start.late_ladder)]
    assert [(v.graph, v.bucket, v.size) for v in verdicts] == cases
    assert all(verdict.ok for verdict in verdicts), verdicts
    if compiled_kernels(cpu_facts()):
        assert max(verdict.worst for verdict in verdicts) == 0.0


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_start_verifies_what_it_recorded(folders, family):
    rank = a_started_rank(folders[family], verify_graphs=True)

    assert [(v.graph, v.bucket) for v in rank.verdicts if v.size == v.bucket] == [
        ("request", 1),
        ("request", 2),
        ("request", 4),
        ("token", 4),
        ("token", 9),
    ]
    assert all(verdict.ok for verdict in rank.verdicts)


@every_family
def test_sizes_around_every_bucket_settle_on_it_or_on_the_next(family):
    rank = a_rank(FAMILIES[family])
    driver = Driver(rank.runner)
    found: dict[int, int] = {}
    settle = rank.runner._settle

    def note(plan: StepPlan):
        shape = settle(plan)
        found[shape.scheduled_tokens] = shape.running_tokens
        return shape

    rank.runner._settle = note
    for size in sorted({at + by for at in TOKEN_SIZES for by in (-1, 0, 1)}):
        driver.add("r", a_prompt(size, size))
        driver.step({"r": size})
        driver.end("r")

    assert found == {3: 4, 4: 4, 5: 9, 8: 9, 9: 9, 10: 16, 15: 16, 16: 16, 17: 17}
    assert rank.steps(Mode.TOKEN_GRAPH) == 8


# Steps in any order


def scramble(driver: Driver, seed: int, steps: int) -> dict[str, list[int]]:
    """Steps of random rows: prompts in chunks, decode rows beside them or alone; the tokens of all requests."""
    order, names, tokens = random.Random(seed), iter(range(1000)), {}
    for _ in range(steps):
        while len(driver.requests) < order.randint(1, 6):
            number = next(names)
            driver.add(f"r{number}", a_prompt(order.randint(1, 20), number))
        rows = list(driver.requests.values())
        order.shuffle(rows)
        prefill: dict[str, int] = {}
        for request in rows:
            left = min(len(request.prompt) - request.computed, 16 - sum(prefill.values()))
            if left > 0 and len(prefill) < 2 and order.random() < 0.7:
                prefill[request.name] = order.randint(1, left)
        decode = [row.name for row in rows if row.is_prefilled and order.random() < 0.8]
        if prefill or decode:
            driver.step(prefill, decode)
        for request in rows:
            if len(request.output) >= 6:
                tokens[request.name] = driver.end(request.name)
    return tokens | {name: driver.end(name) for name in list(driver.requests)}


@cache
def eager_tokens(family: str, seed: int, steps: int) -> dict[str, list[int]]:
    """What such steps give a rank that records nothing."""
    return scramble(Driver(a_rank(FAMILIES[family], graphs="off").runner), seed, steps)


def poison_around_replays(monkeypatch: pytest.MonkeyPatch, rank: WiredRank) -> Counter[str]:
    """Fill all free pool memory with NaN before and after every replay; counts those of forwards by bucket."""
    replays: Counter[str] = Counter()
    replay = RegionGraph.replay

    def poisoned(graph, key, context):
        for each in (*rank.graphs, rank.decoder):
            each.poison()
        hidden = replay(graph, key, context)
        for each in (*rank.graphs, rank.decoder):
            each.poison()
        if graph in rank.graphs:
            replays[f"{graph.kind} {getattr(key, 'requests', key)}"] += 1
        return hidden

    monkeypatch.setattr(RegionGraph, "replay", poisoned)
    return replays


ALL_BUCKETS = {f"request {size}" for size in REQUEST_SIZES} | {
    f"token {size}" for size in TOKEN_SIZES
}


@every_family
@pytest.mark.parametrize("pools", ["per_graph", "per_bucket"])
def test_buckets_share_memory_in_any_order_of_steps(family, pools, monkeypatch):
    """GR-22, GR-23 and F22: numbers of every replay and tokens of every request are an eager rank's."""
    rank = a_rank(FAMILIES[family], graph_pools=pools, verify_graphs_rate=1.0)
    expected = eager_tokens(family, 5, 80)
    replays = poison_around_replays(monkeypatch, rank)

    found = scramble(Driver(rank.runner), 5, 80)

    assert found == expected
    assert set(replays) == ALL_BUCKETS
    assert rank.runner.check.checks == sum(replays.values())
    assert rank.runner.check.failures == 0


def keep_in_the_pool(graph: RegionGraph, result: Tensor) -> Tensor:
    """An outlet that lies in the pool: what let tensors of one recording cross the next (F22)."""
    (backend,) = graph._backends.values()
    return backend.detached(result)


def test_a_result_that_stays_in_shared_memory_is_found(monkeypatch):
    """F22: the fault put back."""
    monkeypatch.setattr(TokenGraph, "_hand_out", keep_in_the_pool)
    rank = a_rank(FAMILIES["llama"], verify_graphs_rate=1.0)
    replays = poison_around_replays(monkeypatch, rank)

    scramble(Driver(rank.runner), 5, 20)

    assert sum(replays.values()) > rank.runner.check.failures > 0


def every_kind_of_step(rank: WiredRank, peer: Peer) -> dict[str, list[int]]:
    """Steps that one token bucket of 9 holds, real and not, while requests go on; their tokens."""
    driver = Driver(rank.runner)
    for at, length in enumerate((7, 9, 12)):
        driver.add(f"r{at}", a_prompt(length, at))
    driver.step({"r0": 7})
    driver.step({"r1": 8}, ["r0"])
    driver.step({"r1": 1, "r2": 5}, ["r0"])
    peer.other = a_row(prefill=(8,))
    driver.step(decode=["r0", "r1"])
    rank.runner.step(StepPlan.empty(90))
    driver.step({"r2": 7}, ["r1"])
    peer.other = a_row()
    rank.runner.step(dummy_plan(prefill_tokens=8, decode_rows=0))
    rank.runner.step(dummy_plan(prefill_tokens=5, decode_rows=3))
    assert rank.runner.step(StepPlan.empty(91)) is None
    driver.step({}, ["r0", "r1", "r2"])
    return {name: driver.end(name) for name in ("r0", "r1", "r2")}


@every_family
def test_every_kind_of_step_goes_through_one_bucket(family):
    """Prefill, mixed, decode beside a prefilling peer, idle and dummy steps."""
    peers = Peer(), Peer()
    eager = a_rank(FAMILIES[family], graphs="off", exchange=peers[0])
    rank = a_rank(
        FAMILIES[family],
        exchange=peers[1],
        token_graph_sizes=(9,),
        req_graph_sizes=(4,),
        verify_graphs_rate=1.0,
    )
    before = rank.steps(Mode.TOKEN_GRAPH)

    expected, found = every_kind_of_step(eager, peers[0]), every_kind_of_step(rank, peers[1])

    assert found == expected
    assert rank.steps(Mode.TOKEN_GRAPH) - before == 8
    assert rank.steps(Mode.REQUEST_GRAPH) >= 1
    assert rank.runner.check.failures == 0


# What is recorded, and in which order


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_region_that_is_called_past_its_op_ends_the_start(folders, family, monkeypatch):
    """F1 and GR-6: the break would vanish, and a token graph would freeze what attention read."""
    monkeypatch.setattr(gqa, "gqa_attention", gqa.gqa_attention.body)

    with pytest.raises(RegionMismatch, match="'gqa_attention' and is the end"):
        a_started_rank(folders[family])


@pytest.mark.parametrize("family", ["moe", "sparse"])
def test_token_graphs_break_at_every_region_and_request_graphs_at_none(family):
    rank = a_rank(FAMILIES[family])
    tokens, requests = rank.graphs

    regions = len(rank.model.regions().names)

    assert regions == (LAYERS if family == "moe" else 2 * LAYERS)
    assert tokens.report().segments == len(TOKEN_SIZES) * (regions + 1)
    assert requests.report().segments == len(REQUEST_SIZES)


class Recordings:
    """Every recording made while it listens, and whether `record_all` made it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int, bool]] = []
        self._within = 0
        record_one, record_all = RegionGraph.record, Recorder.record_all

        def note(graph, key, forward, context):
            size = key.requests if isinstance(key, RequestKey) else key
            self.made.append((graph.kind, size, self._within > 0))
            return record_one(graph, key, forward, context)

        def within(recorder):
            self._within += 1
            record_all(recorder)
            self._within -= 1

        monkeypatch.setattr(RegionGraph, "record", note)
        monkeypatch.setattr(Recorder, "record_all", within)


def test_a_start_records_in_one_place_tokens_first_and_the_largest_first(folders, monkeypatch):
    """GR-16, GR-17. The first start also measures what recordings take, in caches it throws away."""
    a_started_rank(folders["llama"])
    recordings = Recordings(monkeypatch)

    a_started_rank(folders["llama"])

    # Every request bucket is recorded twice: its forward, then the choice behind it.
    decode = [("request", size) for size in (4, 2, 1) for _ in range(2)]
    assert recordings.made == [(*size, True) for size in [("token", 9), ("token", 4), *decode]]


@every_family
@pytest.mark.parametrize("poison", [False, True])
def test_no_recording_and_no_dummy_step_touches_a_block_of_a_request(family, poison):
    """SH-15: all blocks but the null block keep their pattern."""
    rank = a_rank(FAMILIES[family], record=False, poison_pad_rows=poison)
    generator = torch.Generator().manual_seed(3)
    for views in rank.views.values():
        for view in views:
            view.copy_(torch.randn(view.shape, generator=generator))
    before = {name: [v.clone() for v in views] for name, views in rank.views.items()}

    rank.runner.recorder.record_all()
    for prefill, decode in ((9, 0), (5, 3), (0, 4), (0, 8), (20, 0)):
        rank.runner.step(dummy_plan(prefill_tokens=prefill, decode_rows=decode))

    changed = 0
    for name, views in rank.views.items():
        for view, was in zip(views, before[name], strict=True):
            assert torch.equal(view[1:], was[1:])
            changed += not torch.equal(view[0], was[0])
    assert changed > 0


# A bucket that cannot be recorded


class Votes(LocalExchange):
    """Another rank that says no to some of what is voted on, by its number from 0."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.asked: list[bool] = []
        self._refused = refused

    def vote(self, ok: bool, /) -> bool:
        self.asked.append(ok)
        return ok and len(self.asked) - 1 not in self._refused


def failing_at(tokens: int, error: Exception):
    """A llama that fails while it is recorded at so many token rows."""

    def build(given):
        model = FAMILIES["llama"](given)
        forward = model.forward

        def fail(step):
            if RECORDING.recorder is not None and len(step.token_ids) == tokens:
                raise error
            return forward(step)

        model.forward = fail
        return model

    return build


def test_a_bucket_that_one_rank_could_not_record_ends_all_ranks():
    """GR-20: the rank that failed says why, the others say that another did."""
    with pytest.raises(RuntimeError, match="no room for this") as failed:
        a_rank(failing_at(9, RuntimeError("no room for this")), exchange=Votes())
    with pytest.raises(GraphError, match="another rank could not record bucket 9") as told:
        a_rank(FAMILIES["llama"], exchange=Votes(1))

    assert "'prefill'" in str(told.value)
    assert failed.type is RuntimeError


@pytest.mark.parametrize("own", [True, False])
def test_where_that_is_allowed_no_rank_has_the_bucket_and_steps_say_so(own):
    family = failing_at(9, RuntimeError("no room for this")) if own else FAMILIES["llama"]
    exchange = Votes() if own else Votes(1)
    rank = a_rank(family, exchange=exchange, graphs_allow_missing_bucket=True)
    prompt = a_prompt(8, 1)

    found = Driver(rank.runner).alone(prompt, 4)

    tokens, _ = rank.graphs
    assert exchange.asked == [True, not own, True, True, True, True]
    assert set(tokens.buckets()) == set(TOKEN_SIZES) - {9}
    reasons = rank.runner.tally.reasons
    assert reasons["bucket"] == 3
    settled = Driver(rank.runner)
    settled.add("r", prompt)
    shape = rank.runner._settle(settled.plan({"r": 8}))
    assert (shape.why, shape.wanted, shape.mode) == ("eager:not-recorded", 9, Mode.EAGER)
    assert found == Driver(a_rank(FAMILIES["llama"], graphs="off").runner).alone(prompt, 4)


def test_a_bucket_all_ranks_go_without_is_not_verified():
    rank = a_rank(FAMILIES["llama"], exchange=Votes(1), graphs_allow_missing_bucket=True)

    verdicts = rank.wired.verifier.verify()

    assert {verdict.bucket for verdict in verdicts if verdict.graph == "token"} == {4, 16}
    assert {verdict.bucket for verdict in verdicts if verdict.graph == "request"} == {1, 2, 4}
    assert all(verdict.ok for verdict in verdicts)


@pytest.mark.parametrize("when", ["startup", "on-demand"])
def test_running_out_of_memory_is_never_a_missing_bucket(when):
    error = torch.OutOfMemoryError("tried to allocate")
    family = failing_at(9, error)

    def start_and_run():
        rank = a_rank(family, graphs=when, graphs_allow_missing_bucket=True)
        driver = Driver(rank.runner)
        for at in range(WANTED_STEPS + 1):
            driver.alone(a_prompt(8, at), 1)

    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        start_and_run()


# On demand


class Stopwatch:
    """Runs what is timed, and says what the test wants."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def __call__(self, run) -> float:
        run()
        return next(self._seconds)


def decode_steps(rank: WiredRank, count: int) -> Sequence[int]:
    """The tokens of one request after `count` decode steps."""
    return Driver(rank.runner).alone(a_prompt(20, 2), count + 1)


@every_family
def test_on_demand_a_size_is_recorded_between_steps_once_it_was_wanted(family, monkeypatch):
    monkeypatch.setattr(record, "_fastest", Stopwatch(2.0, 1.0))
    expected = decode_steps(a_rank(FAMILIES[family], graphs="off"), 10)
    rank = a_rank(FAMILIES[family], graphs="on-demand")
    _, requests = rank.graphs
    recorded: list[int] = []
    settle = rank.runner._settle

    def note(plan):
        recorded.append(len(requests.buckets()))
        return settle(plan)

    rank.runner._settle = note

    found = decode_steps(rank, 10)

    assert found == expected
    # The first step is the prompt's; warm-up ran two decode rows, which is another size.
    assert recorded == [0] * (1 + WANTED_STEPS) + [1] * (10 - WANTED_STEPS)
    assert [key.requests for key in requests.buckets()] == [1]
    assert rank.steps(Mode.REQUEST_GRAPH) == 10 - WANTED_STEPS


def test_a_graph_that_does_not_pay_is_switched_off_with_its_reason(monkeypatch):
    monkeypatch.setattr(record, "_fastest", Stopwatch(1.0, 1.0))
    rank = a_rank(FAMILIES["llama"], graphs="on-demand")

    found = decode_steps(rank, 10)

    recorder = rank.runner.recorder
    assert recorder.off == {"decode": "a replay takes no less time than the eager forward here"}
    assert rank.steps(Mode.REQUEST_GRAPH) == 0
    assert rank.runner.tally.reasons["eager:off"] == 10 - WANTED_STEPS
    _, requests = rank.graphs
    assert requests.buckets() == ()
    assert found == decode_steps(a_rank(FAMILIES["llama"], graphs="off"), 10)


def test_a_graph_pays_only_if_it_does_on_every_rank(monkeypatch):
    monkeypatch.setattr(record, "_fastest", Stopwatch(2.0, 1.0))
    exchange = Votes(1)
    rank = a_rank(FAMILIES["llama"], graphs="on-demand", exchange=exchange)

    decode_steps(rank, 10)

    assert exchange.asked == [True, True]
    assert set(rank.runner.recorder.off) == {"decode"}


def test_a_size_that_was_refused_is_not_wanted_again(monkeypatch):
    recordings = Recordings(monkeypatch)
    exchange = Votes(0)
    rank = a_rank(
        FAMILIES["llama"], graphs="on-demand", exchange=exchange, graphs_allow_missing_bucket=True
    )

    decode_steps(rank, 4 * WANTED_STEPS)

    assert recordings.made == [("request", 1, False)]
    assert exchange.asked == [True]
    assert rank.runner.tally.reasons["eager:not-recorded"] >= 4 * WANTED_STEPS


# Padding without recording


@every_family
def test_eager_padding_gives_the_same_tokens_and_says_which_bucket_it_ran_at(family, monkeypatch):
    """GR-29: what a token graph would replay runs eagerly at its size; decode steps are replayed."""
    rank = a_rank(FAMILIES[family], token_graph_eager_pad=True)
    expected = eager_tokens(family, 5, 80)
    replays = poison_around_replays(monkeypatch, rank)
    before = rank.steps(Mode.TOKEN_GRAPH)

    found = scramble(Driver(rank.runner), 5, 80)

    assert found == expected
    assert rank.steps(Mode.TOKEN_GRAPH) - before > 10
    assert rank.runner.tally.modes[Mode.TOKEN_GRAPH].waste > 1.0
    assert {name.split()[0] for name in replays} == {"request"}
    tokens, _ = rank.graphs
    assert tokens.buckets() == ()
