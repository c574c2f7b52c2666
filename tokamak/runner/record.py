"""Which recordings does a rank have, and when are they made? All of them in one pass, or each when it was wanted.

`record_all` is the one place that records at start; `record_wanted` records between two steps what settled
shapes have asked for. Both go through `_record`, which prepares the bucket's worst case like any step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch

from tokamak.config.engine import GraphConfig
from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepShape
from tokamak.errors import GraphError
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region_graph import GraphReport
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.runner.choice import PlainChoice
from tokamak.runner.dummy import full_plan
from tokamak.runner.exchange import Exchange
from tokamak.runner.forward import Forward
from tokamak.runner.graph_cost import Source, check_reserve
from tokamak.runner.memory import records_choice
from tokamak.runner.prepare import Preparation
from tokamak.runner.shape import lone_late, lone_shape

logger = logging.getLogger(__name__)

WANTED_STEPS = 4
"""On demand: steps that must have wanted a size before it is recorded; a ramp passes sizes once."""

LONG_CONTEXT_TOKENS = 256
"""Tokens a recorded request has seen: past every chunk and tile border of our kernels."""

TIMED_RUNS = 3
"""Runs each of an eager forward and a replay, the fastest of which say whether replaying pays on a CPU."""


Kind = Literal["token", "decoder", "request"]
"""Which graph records: every `RegionGraph.kind`."""


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
        decoder: DecoderGraph,
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
        self._decoder = decoder
        self._choice = choice
        self._preparation = preparation
        self._forward = forward
        self._exchange = exchange
        self._q_width = q_width
        self._max_model_len = max_model_len
        self._estimate_bytes = estimate_bytes
        self._cost_source: Source = cost_source
        self._wanted: Counter[tuple[Kind, int]] = Counter()
        self._refused: set[tuple[Kind, int]] = set()
        self._pays: set[Kind] = set()
        self._pending: deque[tuple[Kind, int]] = deque()
        self.off = dict(off)
        """Graphs that record nothing, by name, and why."""
        self._chooses = records_choice(config)
        self.is_alone = exchange.ranks == 1
        """Whether it may record at any time: no peer would have to do so too."""
        self.request_buckets = requests
        self.token_buckets = PaddedBuckets(tokens.ladder) if config.eager_pad else tokens
        self.late_buckets = PaddedBuckets(decoder.ladder) if config.eager_pad else decoder

    @torch.inference_mode()
    def open_outlets(self) -> None:
        """Make the buffers results leave through, as wide as an eager forward's; before any recording."""
        tokens = max(self._tokens.ladder.buckets, default=0)
        decode = max(self._requests.ladder.buckets, default=0) * self._q_width
        late = max(self._decoder.ladder.buckets, default=0)
        if tokens:
            left = self._forward.left_by_tokens(self.staging("token", 1))
            self._tokens.open_outlets(left, tokens)
        if not late and not decode:
            return
        like = self._forward.eager(self.staging("request", 1))
        assert like is not None, "decode rows run whole"
        if late:
            self._decoder.open_outlets(like, late)
        if decode:
            self._requests.open_outlets(like, decode)
            if self._chooses:
                self._choice.open_outlets(decode)

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every bucket: prefill first, then decode, the largest of each first (GR-17)."""
        gc.collect()
        for kind, bucket in self._all():
            self._record(kind, bucket)
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

    def _all(self) -> Iterator[tuple[Kind, int]]:
        """Every bucket that is recorded, in the order of GR-17."""
        kinds: tuple[Kind, ...] = ("token", "decoder", "request")
        for kind in kinds:
            for bucket in reversed(self._graph(kind).ladder.buckets):
                if kind == "request" or not self._config.eager_pad:
                    yield kind, bucket

    def put_off(self) -> None:
        """Leave all buckets to `record_next`."""
        self._pending.extend(self._all())

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Record one of the buckets that were put off; returns whether more are left.

        Called between steps by every rank, and by one that has no peers whenever it has nothing else to do.
        """
        if self._pending:
            self._record(*self._pending.popleft())
            if not self._pending:
                self._check_reserve()
        return bool(self._pending)

    def note(self, shape: StepShape) -> None:
        """Count what a settled step would have replayed. The count is the same on all ranks."""
        if self._config.when == "on-demand":
            self._wanted.update(key for key in _wanted(shape) if key not in self._refused)

    def record_wanted(self) -> None:
        """Record what was wanted often enough, or is next of what was put off; called between steps."""
        self.record_next()
        due = [key for key, steps in self._wanted.items() if steps >= WANTED_STEPS]
        for kind, bucket in due:
            del self._wanted[kind, bucket]
            self._record(kind, bucket)
            self._check_reserve()

    def staging(self, kind: Kind, bucket: int) -> StepContext:
        """A bucket's worst case, prepared like any step (GR-16)."""
        late, mode = None, Mode.TOKEN_GRAPH
        if kind == "decoder":
            late, mode = lone_late(Mode.TOKEN_GRAPH, bucket, bucket), Mode.EAGER
        if kind != "request":
            q_width, tokens = 0, bucket
            context_tokens = min(bucket, self._max_model_len)
            requests = -(-bucket // context_tokens)
        else:
            mode = Mode.REQUEST_GRAPH
            q_width, tokens, requests = self._q_width, bucket * self._q_width, bucket
            context_tokens = min(LONG_CONTEXT_TOKENS, self._max_model_len)
        size = (requests, tokens)
        shape = lone_shape(
            mode,
            scheduled=size,
            running=size,
            q_width=q_width,
            dummy=True,
            why="recording",
            late=late,
        )
        plan = full_plan(shape, context_tokens=context_tokens)
        return self._preparation.prepare(plan, shape)

    @torch.inference_mode()
    def measure(self, kind: Kind, bucket: int) -> int | None:
        """Record a bucket; returns the bytes of its graph's pool, None on all ranks if one goes without."""
        self._record(kind, bucket)
        return None if (kind, bucket) in self._refused else self._graph(kind).pool_bytes()

    def reports(self) -> list[GraphReport]:
        """One per graph (GR-21)."""
        reports = [self._tokens.report(), self._requests.report()]
        if self._forward.eager.staged is not None:
            reports.insert(1, self._decoder.report())
        return [*reports, self._choice.graph.report()] if self._chooses else reports

    def _graph(self, kind: Kind) -> TokenGraph | ReqGraph:
        match kind:
            case "token":
                return self._tokens
            case "decoder":
                return self._decoder
            case "request":
                return self._requests

    def _record(self, kind: Kind, bucket: int) -> None:
        """Record one bucket on all ranks, or on none (GR-20)."""
        context = self.staging(kind, bucket)
        failure: GraphError | RuntimeError | None = None
        try:
            self._record_forward(kind, context)
        except (GraphError, RuntimeError) as error:
            failure = error
        if not self._exchange.vote(failure is None):
            self._go_without(kind, bucket, failure)
        elif not self._is_worth_it(kind, context):
            self._switch_off(kind, "a replay takes no less time than the eager forward here")

    def _record_forward(self, kind: Kind, context: StepContext) -> None:
        match kind:
            case "token":
                self._forward.record_tokens(context)
            case "decoder":
                self._forward.record_late(context)
            case "request":
                key = self._forward.record_requests(context)
                if self._chooses:
                    self._choice.record(key, context)

    def _go_without(
        self, kind: Kind, bucket: int, failure: GraphError | RuntimeError | None
    ) -> None:
        """No rank has the bucket. A failure is an error, unless it was allowed and is not about memory."""
        name = self._graph(kind).name
        if isinstance(failure, torch.OutOfMemoryError) or not self._config.allow_missing_bucket:
            raise failure or GraphError(
                f"another rank could not record bucket {bucket} of graph {name!r}",
                hint="its own message says why; graphs_allow_missing_bucket=true goes on without",
            )
        self._forget(kind, bucket)
        self._refused.add((kind, bucket))
        reason = "another rank could not record it" if failure is None else str(failure)
        logger.warning("Graph %r goes on without bucket %s: %s", name, bucket, reason)

    def _is_worth_it(self, kind: Kind, context: StepContext) -> bool:
        """On demand, whether the first bucket of a graph replays faster than it runs eagerly, on every rank."""
        if self._config.when != "on-demand" or kind in self._pays:
            return True
        eager_s = _fastest(lambda: self._forward.eager(context))
        replay_s = _fastest(lambda: self._forward.run(context))
        if not self._exchange.vote(replay_s < eager_s):
            return False
        self._pays.add(kind)
        return True

    def _switch_off(self, kind: Kind, reason: str) -> None:
        """Nothing more is recorded or replayed by a graph."""
        graph = self._graph(kind)
        for bucket in graph.ladder.buckets:
            self._forget(kind, bucket)
        graph.ladder = Ladder(())
        self.off[graph.name] = reason
        logger.info("Graph %r is off: %s.", graph.name, reason)

    def _forget(self, kind: Kind, bucket: int) -> None:
        graph = self._graph(kind)
        if isinstance(graph, TokenGraph):
            graph.forget(bucket)
        else:
            key = RequestKey(bucket, self._q_width)
            graph.forget(key)
            self._choice.graph.forget(key)

    def _check_reserve(self) -> None:
        real = sum(report.pool_bytes for report in self.reports())
        line = check_reserve(
            estimate=self._estimate_bytes,
            real=real,
            source=self._cost_source,
            backend=self._config.backend,
        )
        logger.debug("%s", line)


def _wanted(shape: StepShape) -> Iterator[tuple[Kind, int]]:
    """The buckets a settled step would have replayed."""
    if shape.wanted is not None:
        yield "request" if shape.q_width else "token", shape.wanted
    if shape.late is not None and shape.late.wanted is not None:
        yield "decoder", shape.late.wanted


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs. Where a device runs behind the host, this is the host's time."""
    best = float("inf")
    for _ in range(TIMED_RUNS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
