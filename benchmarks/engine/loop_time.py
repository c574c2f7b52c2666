"""What does a turn of the engine's loop cost where no model runs, part by part and by number of requests?

    OMP_NUM_THREADS=1 python -m benchmarks.engine.loop_time [--requests 1 32 256]

The engine core plans, settles, takes and delivers decode steps whose tokens are there at once: plans and sizes are the
scheduler's and the runner's own, the forward is left out. One row per number of requests, medians in microseconds:
`plan`, `settle` (what every rank must know, and the size), `take`, `deliver`, `turn` (all of it).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch

from tests.support.factory import cache_groups
from tests.support.tiny import llama_config, write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.core.plan import StepPlan, StepResult
from tokamak.core.request import SamplingParams
from tokamak.device.waits import HostWaits
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.graphs.ladder import Ladder
from tokamak.runner.exchange import NO_DEMAND, LocalExchange
from tokamak.runner.results import InFlightResult
from tokamak.runner.shape import ForwardMode, Policy, RunningTable
from tokamak.runner.tally import StepTally
from tokamak.sampling.sampler import Sampled
from tokamak.telemetry.spans import SPANS, Spans

PROMPT_TOKENS = 64
DISCARDED_TURNS = 32
TURNS = 400
BLOCK_TOKENS = 16
PARTS = ("plan", "settle", "take", "deliver", "turn")

T = TypeVar("T")


@dataclass
class Clock:
    """Microseconds by part, one number a call."""

    times_us: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def time(self, part: str, call: Callable[[], T]) -> T:
        """Call and note how long it took."""
        began = time.perf_counter_ns()
        result = call()
        self.times_us[part].append((time.perf_counter_ns() - began) / 1e3)
        return result


class EveryBucket:
    """A request graph that has recorded every size."""

    def __init__(self, largest: int) -> None:
        self.ladder = Ladder(tuple(range(1, largest + 1)))

    def bucket(self, size: int, /, *, q_width: int = 1, split: bool = False) -> int | None:
        """The size itself."""
        del q_width, split
        return size


class NoModel:
    """An executor whose steps are settled and have run at once; every token is the same."""

    def __init__(self, clock: Clock, requests: int) -> None:
        self._clock = clock
        self._exchange = LocalExchange()
        self._table = RunningTable(1)
        self._graph = EveryBucket(max(requests, PROMPT_TOKENS * requests))
        self._tally = StepTally()
        self.waits = HostWaits()
        self.rank = SimpleNamespace(
            start=SimpleNamespace(
                groups=cache_groups(), memory=SimpleNamespace(group_blocks=(64 * (requests + 1),))
            ),
            runner=SimpleNamespace(waits=self.waits, spans=Spans()),
        )

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        """Settle the step and answer it."""
        self._clock.time("settle", lambda: self._settle(plan))
        rows = len(plan.sampled_rows)
        sampled = Sampled(
            token_ids=torch.full((rows,), 7, dtype=torch.int32),
            logprobs=(None,) * rows,
            errors={},
            finished=frozenset(),
        )
        result = InFlightResult.launch(plan, sampled, {}, self.waits)
        return SimpleNamespace(plan=plan, take=lambda: self._take(result))

    def _settle(self, plan: StepPlan) -> None:
        shape = ForwardMode.decide(
            plan,
            exchange=self._exchange,
            table=self._table,
            req_graph=self._graph,
            token_graph=self._graph,
            policy=Policy(drafts=False),
            eager_demand=NO_DEMAND,
        )
        self._tally.count(shape, None)

    def _take(self, result: InFlightResult) -> StepResult:
        return self._clock.time("take", result.take)

    def close(self) -> None:
        """Nothing runs."""


def a_core(folder: Path, clock: Clock, requests: int) -> EngineCore:
    """An engine core over no model, for that many requests."""
    executor = NoModel(clock, requests)
    executor.rank.start.config = configure(
        EngineOptions(
            model=str(folder),
            graphs="off",
            max_model_len=2 * (DISCARDED_TURNS + TURNS + PROMPT_TOKENS),
            max_num_seqs=requests,
            max_num_batched_tokens=max(512, PROMPT_TOKENS * requests),
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=64 * 1024**2,
        ),
        progress=False,
    )
    core = EngineCore(executor.rank.start.config, executor)  # pyright: ignore[reportArgumentType]
    for at in range(requests):
        core.add(
            AddRequest(
                request_id=f"request-{at}",
                prompt_ids=[at + 3] * (PROMPT_TOKENS - at % BLOCK_TOKENS),
                params=SamplingParams(temperature=0.0),
                max_tokens=DISCARDED_TURNS + TURNS + 8,
                stop_ids=[2],
                sibling=0,
                priority=0,
                cache_salt="",
            )
        )
    return core


def measure(folder: Path, requests: int) -> dict[str, float]:
    """Median microseconds of every part."""
    clock = Clock()
    core = a_core(folder, clock, requests)
    scheduler, plan = core._scheduler, core._scheduler.plan
    scheduler.plan = lambda: clock.time("plan", plan)
    deliver = SPANS.index("deliver")
    spans = core._executor.rank.runner.spans
    for turn in range(DISCARDED_TURNS + TURNS):
        if turn == DISCARDED_TURNS:
            for times in clock.times_us.values():
                times.clear()
        clock.time("turn", core.step)
        clock.times_us["deliver"].append(spans.current[deliver] / 1e3)
        spans.end_step()
    return {part: statistics.median(clock.times_us[part]) for part in PARTS}


def main() -> None:
    """Print one row per number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("requests " + " ".join(f"{part:>8}" for part in PARTS))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), llama_config(max_position_embeddings=2048))
        for requests in asked.requests:
            row = measure(Path(folder), requests)
            print(f"{requests:8} " + " ".join(f"{row[part]:8.1f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
