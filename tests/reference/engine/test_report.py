"""A real engine's report counts the steps it ran, by mode and reason, and lists what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny import write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCore]:
    """A tiny model with decode steps of one and three requests recorded."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = write_checkpoint(tmp_path / "tiny")
    options = EngineOptions(
        model=str(folder),
        dtype="fp32",
        threads=1,
        max_num_seqs=4,
        max_model_len=64,
        graphs="startup",
        req_graph_sizes="1,3",
        verify_graphs=True,
    )
    core = EngineCore(configure(options))
    yield core
    core.close()


def run(core: EngineCore, *, requests: int, tokens: int) -> None:
    for at in range(requests):
        core.add(
            AddRequest(
                request_id=f"r{at}",
                prompt_ids=[5, 6, 7],
                params=SamplingParams(temperature=0),
                max_tokens=tokens,
                stop_ids=[],
                sibling=0,
                priority=0,
                cache_salt="",
            )
        )
    while core.has_work:
        core.step()


def test_steps_are_counted_by_mode_and_reason_with_their_padding(core: EngineCore) -> None:
    before = core.report()

    run(core, requests=2, tokens=6)

    after = core.report()
    new = {mode: after.modes[mode].steps - before.modes[mode].steps for mode in after.modes}
    assert new == {"eager": 1, "request_graph": 5, "token_graph": 0}
    assert sum(new.values()) == core.stats().steps
    assert sum(after.reasons.values()) - sum(before.reasons.values()) == 6
    replayed = after.modes["request_graph"]
    assert replayed.scheduled_tokens - before.modes["request_graph"].scheduled_tokens == 5 * 2
    assert replayed.running_tokens - before.modes["request_graph"].running_tokens == 5 * 3
    launched = after.spans["launch"].counts[-1] - before.spans["launch"].counts[-1]
    assert launched == 6


def test_what_is_recorded_and_verified_is_listed(core: EngineCore) -> None:
    report = core.report()

    decode = next(graph for graph in report.graphs if graph.kind == "request")
    assert (decode.ladder, decode.recorded, decode.state) == ([1, 3], [1, 3], "recorded")
    assert 0 < decode.pool_bytes <= report.graph_reserve_bytes
    assert decode.segments >= 2
    assert decode.seconds > 0
    assert {verdict.bucket for verdict in report.verdicts if verdict.ok} == {1, 3}
