"""Which recordings does a rank have, and when are they made? All of them in one pass, or each when it was wanted.

`record_all` is the one place that records at start; `record_wanted` records between two steps what settled
shapes have asked for. Both go through `_record`, which prepares the bucket's worst case like any step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from tokamak.config.engine import GraphConfig
from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepShape
from tokamak.errors import GraphError
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region_graph import GraphReport
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.graphs.token_graph import TokenGraph
from tokamak.runner.choice import PlainChoice
from tokamak.runner.dummy import full_plan
from tokamak.runner.exchange import Exchange
from tokamak.runner.forward import Forward
from tokamak.runner.graph_cost import Source, check_reserve
from tokamak.runner.memory import records_choice
from tokamak.runner.prepare import Preparation
from tokamak.runner.shape import lone_shape

logger = logging.getLogger(__name__)

WANTED_STEPS = 4
"""On demand: steps that must have wanted a size before it is recorded; a ramp passes sizes once."""

LONG_CONTEXT_TOKENS = 256
"""Tokens a recorded request has seen: past every chunk and tile border of our kernels."""

TIMED_RUNS = 3
"""Runs each of an eager forward and a replay, the fastest of which say whether replaying pays on a CPU."""


class PaddedBuckets:
    """Token buckets that run eagerly at their size and padding: all are there, none is recorded (GR-29)."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder

    def bucket(self, tokens: int, /) -> int | None:
        """The bucket that holds so many token rows."""
        return self.ladder.ceil(tokens)


class Recorder:
    """Records the buckets of a rank's graphs, in the same order on all ranks."""

    def __init__(
        self,
        config: GraphConfig,
        *,
        requests: ReqGraph,
        tokens: TokenGraph,
        choice: PlainChoice,
        off: Mapping[str, str],
        preparation: Preparation,
        forward: Forward,
        exchange: Exchange,
        q_width: int,
        max_model_len: int,
        estimate_bytes: int,
        cost_source: Source,
    ) -> None:
        self._config = config
        self._requests = requests
        self._tokens = tokens
        self._choice = choice
        self._preparation = preparation
        self._forward = forward
        self._exchange = exchange
        self._q_width = q_width
        self._max_model_len = max_model_len
        self._estimate_bytes = estimate_bytes
        self._cost_source: Source = cost_source
        self._wanted: Counter[tuple[Mode, int]] = Counter()
        self._refused: set[tuple[Mode, int]] = set()
        self._pays: set[Mode] = set()
        self.off = dict(off)
        """Graphs that record nothing, by name, and why."""
        self._chooses = records_choice(config)
        self.request_buckets = requests
        self.token_buckets = PaddedBuckets(tokens.ladder) if config.eager_pad else tokens

    @torch.inference_mode()
    def open_outlets(self) -> None:
        """Make the buffers results leave through, as wide as an eager forward's; before any recording."""
        tokens = max(self._tokens.ladder.buckets, default=0)
        decode = max(self._requests.ladder.buckets, default=0) * self._q_width
        if not tokens and not decode:
            return
        like = self._forward.eager(self.staging(Mode.REQUEST_GRAPH, 1))
        if tokens:
            self._tokens.open_outlets(like, tokens)
        if decode:
            self._requests.open_outlets(like, decode)
            if self._chooses:
                self._choice.open_outlets(decode)

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every bucket: prefill first, then decode, the largest of each first (GR-17)."""
        gc.collect()
        for mode in (Mode.TOKEN_GRAPH, Mode.REQUEST_GRAPH):
            for bucket in reversed(self._graph(mode).ladder.buckets):
                if mode is Mode.REQUEST_GRAPH or not self._config.eager_pad:
                    self._record(mode, bucket)
        self._check_reserve()
        for report in self.reports():
            logger.info(
                "Recorded %s graph %r: buckets %s in %.1f s, %d segments, %d pool bytes.",
                report.kind,
                report.name,
                ", ".join(map(str, report.buckets)) or "none",
                report.seconds,
                report.segments,
                report.pool_bytes,
            )

    def note(self, shape: StepShape) -> None:
        """Count what a settled step would have replayed. The count is the same on all ranks."""
        if self._config.when == "on-demand" and shape.wanted is not None:
            mode = Mode.REQUEST_GRAPH if shape.q_width else Mode.TOKEN_GRAPH
            if (mode, shape.wanted) not in self._refused:
                self._wanted[mode, shape.wanted] += 1

    def record_wanted(self) -> None:
        """Record what was wanted often enough; called between steps."""
        due = [key for key, steps in self._wanted.items() if steps >= WANTED_STEPS]
        for mode, bucket in due:
            del self._wanted[mode, bucket]
            self._record(mode, bucket)
            self._check_reserve()

    def staging(self, mode: Mode, bucket: int) -> StepContext:
        """A bucket's worst case, prepared like any step (GR-16)."""
        if mode is Mode.TOKEN_GRAPH:
            q_width, tokens = 0, bucket
            context_tokens = min(bucket, self._max_model_len)
            requests = -(-bucket // context_tokens)
        else:
            q_width, tokens, requests = self._q_width, bucket * self._q_width, bucket
            context_tokens = min(LONG_CONTEXT_TOKENS, self._max_model_len)
        size = (requests, tokens)
        shape = lone_shape(
            mode, scheduled=size, running=size, q_width=q_width, dummy=True, why="recording"
        )
        plan = full_plan(shape, context_tokens=context_tokens)
        return self._preparation.prepare(plan, shape)

    @torch.inference_mode()
    def measure(self, mode: Mode, bucket: int) -> int | None:
        """Record a bucket; returns the bytes of its graph's pool, None on all ranks if one goes without."""
        self._record(mode, bucket)
        return None if (mode, bucket) in self._refused else self._graph(mode).pool_bytes()

    def reports(self) -> list[GraphReport]:
        """One per graph (GR-21)."""
        reports = [self._tokens.report(), self._requests.report()]
        return [*reports, self._choice.graph.report()] if self._chooses else reports

    def _graph(self, mode: Mode) -> TokenGraph | ReqGraph:
        return self._tokens if mode is Mode.TOKEN_GRAPH else self._requests

    def _record(self, mode: Mode, bucket: int) -> None:
        """Record one bucket on all ranks, or on none (GR-20)."""
        context = self.staging(mode, bucket)
        failure: GraphError | RuntimeError | None = None
        try:
            if mode is Mode.TOKEN_GRAPH:
                self._tokens.record(bucket, self._forward.model, context)
            else:
                key = RequestKey(bucket, self._q_width)
                self._requests.record(key, self._forward.model, context)
                if self._chooses:
                    self._choice.record(key, context)
        except (GraphError, RuntimeError) as error:
            failure = error
        if not self._exchange.vote(failure is None):
            self._go_without(mode, bucket, failure)
        elif not self._is_worth_it(mode, context):
            self._switch_off(mode, "a replay takes no less time than the eager forward here")

    def _go_without(
        self, mode: Mode, bucket: int, failure: GraphError | RuntimeError | None
    ) -> None:
        """No rank has the bucket. A failure is an error, unless it was allowed and is not about memory."""
        name = self._graph(mode).name
        if isinstance(failure, torch.OutOfMemoryError) or not self._config.allow_missing_bucket:
            raise failure or GraphError(
                f"another rank could not record bucket {bucket} of graph {name!r}",
                hint="its own message says why; graphs_allow_missing_bucket=true goes on without",
            )
        self._forget(mode, bucket)
        self._refused.add((mode, bucket))
        reason = "another rank could not record it" if failure is None else str(failure)
        logger.warning("Graph %r goes on without bucket %s: %s", name, bucket, reason)

    def _is_worth_it(self, mode: Mode, context: StepContext) -> bool:
        """On demand, whether the first bucket of a graph replays faster than it runs eagerly, on every rank."""
        if self._config.when != "on-demand" or mode in self._pays:
            return True
        eager_s = _fastest(lambda: self._forward.eager(context))
        replay_s = _fastest(lambda: self._forward.run(context))
        if not self._exchange.vote(replay_s < eager_s):
            return False
        self._pays.add(mode)
        return True

    def _switch_off(self, mode: Mode, reason: str) -> None:
        """Nothing more is recorded or replayed by a graph."""
        graph = self._graph(mode)
        for bucket in graph.ladder.buckets:
            self._forget(mode, bucket)
        graph.ladder = Ladder(())
        self.off[graph.name] = reason
        logger.info("Graph %r is off: %s.", graph.name, reason)

    def _forget(self, mode: Mode, bucket: int) -> None:
        if mode is Mode.TOKEN_GRAPH:
            self._tokens.forget(bucket)
        else:
            key = RequestKey(bucket, self._q_width)
            self._requests.forget(key)
            self._choice.graph.forget(key)

    def _check_reserve(self) -> None:
        real = sum(report.pool_bytes for report in self.reports())
        line = check_reserve(estimate=self._estimate_bytes, real=real, source=self._cost_source)
        logger.debug("%s", line)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs. Where a device runs behind the host, this is the host's time."""
    best = float("inf")
    for _ in range(TIMED_RUNS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
