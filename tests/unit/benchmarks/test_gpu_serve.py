"""Does the benchmark of serving compare like with like, and show what it found?"""

from __future__ import annotations

import argparse
import random

import pytest

from benchmarks.serving.gpu_serve import _closed_loop, _request, table
from tests.support.scripted_engine import ScriptedCore
from tokamak.core.request import FinishReason
from tokamak.engine.messages import RequestUpdate

ASKED = argparse.Namespace(prompt=5, new=6)


class WatchedCore(ScriptedCore):
    """Notes how many requests are under way at each step."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.under_way: list[int] = []
        self.ended = 0

    def step(self) -> list[RequestUpdate]:
        """Step, and count."""
        self.under_way.append(len(self.added) - self.ended)
        updates = super().step()
        self.ended += sum(update.finish_reason is not None for update in updates)
        return updates


def requests(count: int):
    chance = random.Random(1)
    return [_request(f"r{at}", chance, 200, ASKED) for at in range(count)]


def test_the_engine_alone_runs_as_many_requests_as_clients_would_send():
    core = WatchedCore()

    seconds = _closed_loop(core, requests(10), 4)

    assert seconds > 0
    assert max(core.under_way) == 4
    assert core.ended == len(core.added) == 10
    assert core.under_way.count(4) > len(core.under_way) / 2


def test_a_request_that_fails_ends_the_measurement():
    core, asked = ScriptedCore(), requests(3)
    core.fail_requests[asked[0].prompt_ids[0]] = RequestUpdate(
        request_id="", finish_reason=FinishReason.ERROR, error="no room", error_kind="engine"
    )

    with pytest.raises(RuntimeError, match="no room"):
        _closed_loop(core, asked, 2)


def test_the_table_shows_starts_and_what_http_costs():
    row = {
        "model": "m",
        "concurrency": 32,
        "requests": 128,
        "engine_tokens_per_s": 1000.0,
        "served_tokens_per_s": 960.0,
        "http_cost_percent": 4.0,
        "ttft_ms": 12.0,
        "tpot_ms": 1.5,
        "p99_itl_ms": 3.25,
        "front_end_us_per_token": 27.0,
    }
    start = {"ready_s": 7.5, "first_token_s": 7.6, "load_s": "build 1.25"}

    shown = table([row], {"m": {"cold": start}}).splitlines()

    assert shown[0].split()[:3] == ["m", "cold", "start:"]
    assert "build 1.25" in shown[0]
    assert shown[2].split() == [
        "m", "32", "1000", "960", "4.0%", "12.0", "1.500", "3.25", "27.0",
    ]  # fmt: skip
