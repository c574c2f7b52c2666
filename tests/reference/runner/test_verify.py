"""Are faulty recordings found before they serve, and while they do? Every fault is put into a real model here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.graph_families import FAMILIES, TILE_ROWS, TinySparse
from tests.support.tiny import write_checkpoint
from tests.support.wired_rank import Driver, WiredRank, a_prompt, a_rank
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.config.settle_graphs import compiled_kernels
from tokamak.core.context import current
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Mode
from tokamak.device.facts import cpu_facts
from tokamak.engine.configure import configure
from tokamak.errors import GraphMismatch, HostReadInRecording
from tokamak.graphs import region_graph
from tokamak.graphs.region import Manifest, begin_forward, eager_region
from tokamak.models.llama.llama import Llama
from tokamak.runner import assemble as assembling
from tokamak.runner import record
from tokamak.runner.assemble import Rank, assemble
from tokamak.runner.record import WANTED_STEPS
from tokamak.runner.wiring import FIRST_REPLAYS_CHECKED


@pytest.fixture(autouse=True)
def _costs_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "costs"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def a_verified_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, family: type[Llama], **options: object
) -> Rank:
    """Start a rank of a checkpoint with another class of model, and let it verify what it records."""
    monkeypatch.setattr(assembling, "find", lambda architecture: family)
    asked = {
        "dtype": "fp32",
        "threads": 1,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "graphs": "startup",
        "req_graph_sizes": (),
        "token_graph_sizes": (),
        "verify_graphs": True,
        **options,
    }
    return assemble(configure(EngineOptions(model=str(folder), **asked)))


REQUESTS = {"req_graph_sizes": (2, 4)}
TOKENS = {"token_graph_sizes": (6, 9)}


def bad(rank: WiredRank) -> list[tuple[str, int, int]]:
    """Graph, bucket and size of every verdict that is not ok."""
    return [(v.graph, v.bucket, v.size) for v in rank.wired.verifier.verify() if not v.ok]


def of_llama(kind: type[Llama]):
    """How a variant of llama is built, with the weights llama has in these tests."""

    def build(given):
        model = FAMILIES["llama"](given)
        # The same object with another class: variants add no attributes that are made when they are built.
        model.__class__ = kind
        return model

    return build


# A number that varies, frozen in an argument


@eager_region("frozen_gain")
def frozen_gain(x: Tensor, out: Tensor, rows: int) -> None:
    """Scales by the number of rows."""
    out.copy_(x * (1.0 + rows / 64))


class FrozenRows(Llama):
    """Hands the step's real row count to a region as an argument (GR-10, F24)."""

    def regions(self) -> Manifest:
        return Manifest((*super().regions().names, "frozen_gain"))

    def forward(self, step: StepInputs) -> Tensor:
        x = super().forward(step)
        out = torch.empty_like(x)
        frozen_gain(x, out, current().shape.scheduled_tokens)
        return out


class LiveRows(FrozenRows):
    """The same, read from the context where the body runs: what GR-10 asks for."""

    def regions(self) -> Manifest:
        return Manifest((*Llama.regions(self).names, "live_gain"))

    def forward(self, step: StepInputs) -> Tensor:
        x = Llama.forward(self, step)
        out = torch.empty_like(x)
        live_gain(x, out)
        return out


@eager_region("live_gain", always_eager=True)
def live_gain(x: Tensor, out: Tensor) -> None:
    """Scales by the number of rows."""
    out.copy_(x * (1.0 + current().shape.scheduled_tokens / 64))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (REQUESTS, "2 of 4 verified sizes .* the request bucket 2 at size 1"),
        (TOKENS, "4 of 6 verified sizes .* the token bucket 6 at size 1"),
    ],
    ids=["requests", "tokens"],
)
def test_a_row_count_frozen_in_a_region_s_argument_ends_the_start(
    folder, monkeypatch, sizes, found
):
    """F24: an offset was frozen by tracing, and only the acceptance rate told of it."""
    with pytest.raises(GraphMismatch, match=found):
        a_verified_start(folder, monkeypatch, FrozenRows, **sizes)


def test_every_size_but_the_recorded_one_shows_the_frozen_number():
    rank = a_rank(of_llama(FrozenRows), req_graph_sizes=(1, 4), token_graph_sizes=(6, 9))

    assert bad(rank) == [
        ("request", 4, 2),
        ("request", 4, 3),
        ("token", 6, 1),
        ("token", 6, 5),
        ("token", 9, 7),
        ("token", 9, 8),
    ]


def test_the_same_number_read_from_the_context_is_right_at_every_size():
    rank = a_rank(of_llama(LiveRows), req_graph_sizes=(1, 4), token_graph_sizes=(6, 9))

    assert bad(rank) == []


@pytest.mark.parametrize("family", [Llama, LiveRows])
def test_a_healthy_model_starts(folder, monkeypatch, family):
    rank = a_verified_start(folder, monkeypatch, family, **REQUESTS, **TOKENS)

    assert len(rank.verdicts) == 10
    assert all(verdict.ok for verdict in rank.verdicts)
    if compiled_kernels(cpu_facts()):
        assert {verdict.worst for verdict in rank.verdicts} == {0.0}


def test_attention_without_an_order_of_its_sums_is_told_from_a_fault():
    """Blocks our kernels do not serve go to PyTorch's attention, which sums a recorded step over a wider table."""
    rank = a_rank(FAMILIES["llama"], block_size=3, num_blocks_override=200)

    verdicts = rank.wired.verifier.verify()

    assert all(verdict.ok for verdict in verdicts)
    assert 0.0 < max(verdict.worst for verdict in verdicts) < 1e-5


# A derived table that is not filled again


class DroppedOnce:
    """A start of the forward that forgets the tables before the warm-up, and not before the capture."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, context) -> None:
        self._calls += 1
        if not self._calls or self._calls % 2:
            begin_forward(context)


def test_a_table_the_recording_does_not_fill_is_found(monkeypatch):
    """GR-18 and GR-27: the recorded forward finds the warm-up's table, and replays read an older step's."""
    with monkeypatch.context() as patch:
        patch.setattr(region_graph, "begin_forward", DroppedOnce())
        rank = a_rank(TinySparse, token_graph_sizes=())

    found = bad(rank)
    healthy = bad(a_rank(TinySparse, token_graph_sizes=()))

    assert {graph for graph, _, _ in found} == {"request"}
    assert healthy == []


class KeptTables(TinySparse):
    """Keeps the running sums of the first forward at a size, and never asks for them again."""

    def __init__(self, build) -> None:
        super().__init__(build)
        self._kept: dict[int, Tensor] = {}
        for attention in self._attention:
            attention.tables = self.kept_tables

    def kept_tables(self, rows) -> tuple[Tensor, Tensor]:
        size = len(rows.lengths)
        if size not in self._kept:
            self._kept[size] = rows.indptrs()
        return self._kept[size], rows.unit_tiles(TILE_ROWS)


def test_a_model_that_keeps_the_tables_of_an_earlier_forward_is_found():
    rank = a_rank(KeptTables, token_graph_sizes=(), req_graph_sizes=(4,))

    assert ("request", 4, 3) in bad(rank)


# A real row that is taken for padding


@eager_region("clearing_last", always_eager=True)
def clearing_last(x: Tensor, out: Tensor) -> None:
    """Clears the last row of a bucket, real or not."""
    out.copy_(x)
    if current().shape.mode is not Mode.EAGER:
        out[-1].zero_()


class ClearsLast(Llama):
    """Takes the last row of every bucket for padding."""

    def regions(self) -> Manifest:
        return Manifest((*super().regions().names, "clearing_last"))

    def forward(self, step: StepInputs) -> Tensor:
        x = super().forward(step)
        out = torch.empty_like(x)
        clearing_last(x, out)
        return out


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (REQUESTS, "2 of 4 verified sizes .* the request bucket 2 at size 2, by 1 of"),
        (TOKENS, "2 of 6 verified sizes .* the token bucket 6 at size 6, by 1 of"),
    ],
    ids=["requests", "tokens"],
)
def test_a_real_row_cleared_as_padding_ends_the_start(folder, monkeypatch, sizes, found):
    with pytest.raises(GraphMismatch, match=found):
        a_verified_start(folder, monkeypatch, ClearsLast, **sizes)


def test_it_shows_where_the_bucket_is_full():
    rank = a_rank(of_llama(ClearsLast), req_graph_sizes=(1, 4), token_graph_sizes=(6, 9))

    assert bad(rank) == [("request", 1, 1), ("request", 4, 4), ("token", 6, 6), ("token", 9, 9)]


# Numbers that were copied to the host


class HostPosition(Llama):
    """Reads the first position on the host and goes on with that."""

    def forward(self, step: StepInputs) -> Tensor:
        return super().forward(step) * (1.0 + int(step.positions[0]) / 64)


class HiddenHostTokens(Llama):
    """Takes the ids through numpy, where no op of PyTorch shows that they were read."""

    def forward(self, step: StepInputs) -> Tensor:
        ids = torch.from_numpy(step.token_ids.numpy().copy())
        return super().forward(step) + ids[:, None] / 64


@pytest.mark.parametrize("sizes", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_a_position_read_to_the_host_in_a_recording_ends_the_start(folder, monkeypatch, sizes):
    with pytest.raises(HostReadInRecording, match="_local_scalar_dense"):
        a_verified_start(folder, monkeypatch, HostPosition, **sizes)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (REQUESTS, "4 of 4 verified sizes .* the request bucket 2 at size 1"),
        (TOKENS, "6 of 6 verified sizes .* the token bucket 6 at size 1"),
    ],
    ids=["requests", "tokens"],
)
def test_token_ids_copied_to_the_host_unseen_end_the_start(folder, monkeypatch, sizes, found):
    with pytest.raises(GraphMismatch, match=found):
        a_verified_start(folder, monkeypatch, HiddenHostTokens, **sizes)


# While serving


def eager_tokens(kind: type[Llama], prompt: list[int], tokens: int) -> list[int]:
    """What a rank that records nothing gives."""
    return Driver(a_rank(of_llama(kind), graphs="off").runner).alone(prompt, tokens)


def test_a_checked_step_gives_the_eager_result_and_counts_the_failure():
    rank = a_rank(of_llama(HiddenHostTokens), token_graph_sizes=(8,), verify_graphs_rate=1.0)
    prompt = a_prompt(7, 1)

    found = Driver(rank.runner).alone(prompt, 6)

    assert found == eager_tokens(HiddenHostTokens, prompt, 6)
    assert (rank.runner.check.checks, rank.runner.check.failures) == (6, 6)


def test_an_unchecked_step_gives_what_was_replayed():
    """The fault is one that tokens show: it is the check that keeps them right above."""
    rank = a_rank(of_llama(HiddenHostTokens), token_graph_sizes=(8,))
    prompt = a_prompt(7, 1)

    found = Driver(rank.runner).alone(prompt, 6)

    assert found != eager_tokens(HiddenHostTokens, prompt, 6)
    assert (rank.runner.check.checks, rank.runner.check.failures) == (0, 0)


@pytest.mark.parametrize(("rate", "checks"), [(0.0, 0), (0.25, 3), (0.5, 6), (1.0, 12)])
def test_the_rate_is_the_share_of_replayed_steps_that_are_checked(rate, checks):
    rank = a_rank(FAMILIES["llama"], token_graph_sizes=(8,), verify_graphs_rate=rate)

    Driver(rank.runner).alone(a_prompt(7, 1), 12)

    assert (rank.runner.check.checks, rank.runner.check.failures) == (checks, 0)


@pytest.mark.parametrize("kind", [Llama, HiddenHostTokens])
def test_on_demand_the_first_replays_of_every_bucket_are_checked(kind, monkeypatch):
    monkeypatch.setattr(record, "_fastest", Paying())
    rank = a_rank(
        of_llama(kind), graphs="on-demand", token_graph_sizes=(), req_graph_sizes=(1, 2),
        verify_graphs=True,
    )  # fmt: skip
    driver, check = Driver(rank.runner), rank.runner.check
    for name in "ab":
        driver.add(name, a_prompt(5, ord(name)))
        driver.step({name: 5})
    for _ in range(WANTED_STEPS):
        driver.step(decode=["a"])
        driver.step(decode=["a", "b"])

    for _ in range(FIRST_REPLAYS_CHECKED + 2):
        driver.step(decode=["a"])
        driver.step(decode=["a", "b"])

    assert check.checks == 2 * FIRST_REPLAYS_CHECKED
    assert check.failures == (check.checks if kind is HiddenHostTokens else 0)


class Paying:
    """Runs what is timed; the second of two takes half as long."""

    def __init__(self) -> None:
        self._seconds = 1.0

    def __call__(self, run) -> float:
        run()
        self._seconds /= 2
        return self._seconds


# Rows that read padding


class MixesRows(Llama):
    """Centres its rows over the whole step, padding included."""

    def forward(self, step: StepInputs) -> Tensor:
        x = super().forward(step)
        return x - 0.01 * x.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("sizes", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_a_row_that_reads_padding_becomes_not_a_number_while_padding_is_poisoned(sizes):
    kind = "request" if sizes is REQUESTS else "token"
    options = {"req_graph_sizes": (), "token_graph_sizes": (), **sizes, "poison_pad_rows": True}

    poisoned = a_rank(of_llama(MixesRows), **options).wired.verifier.verify()

    assert {verdict.graph for verdict in poisoned} == {kind}
    assert all((v.worst == float("inf")) is (v.size < v.bucket) for v in poisoned), poisoned
    assert all(verdict.ok is (verdict.size == verdict.bucket) for verdict in poisoned)


@pytest.mark.parametrize(("kind", "places"), [(FrozenRows, 0), (MixesRows, 4)])
def test_eager_padding_tells_a_fault_of_padding_from_one_of_recording(kind, places):
    """GR-29: with nothing recorded, what was frozen is right again, and what reads padding is not."""
    rank = a_rank(
        of_llama(kind),
        token_graph_eager_pad=True,
        poison_pad_rows=True,
        req_graph_sizes=(),
        token_graph_sizes=(6, 9),
    )

    assert len(bad(rank)) == places


def test_its_requests_get_an_error_while_padding_is_poisoned():
    rank = a_rank(of_llama(MixesRows), token_graph_sizes=(8,), poison_pad_rows=True)
    driver = Driver(rank.runner)
    driver.add("r", a_prompt(7, 1))

    in_flight = rank.runner.step(driver.plan({"r": 7}))

    assert in_flight is not None
    (row,) = in_flight.take().rows
    assert row.error


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"token_graph_eager_pad": True}, {"graphs": "off"}],
    ids=["replay", "pad", "off"],
)
def test_a_healthy_model_keeps_its_tokens_while_padding_is_poisoned(family, options):
    prompts = {f"r{at}": a_prompt(3 + 2 * at, at) for at in range(3)}

    def tokens(rank: WiredRank) -> list[list[int]]:
        driver = Driver(rank.runner)
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.step({"r0": 3})
        driver.step({"r1": 5, "r2": 4}, ["r0"])
        driver.step({"r2": 3}, ["r0", "r1"])
        for _ in range(4):
            driver.step(decode=["r0", "r1", "r2"])
        return [driver.end(name) for name in prompts]

    healthy = tokens(a_rank(FAMILIES[family], graphs="off"))
    poisoned = a_rank(FAMILIES[family], poison_pad_rows=True, **options)

    assert tokens(poisoned) == healthy
    null_blocks = [view[0] for views in poisoned.views.values() for view in views]
    assert all(torch.isnan(block).all() for block in null_blocks)
