"""Which parts has a runner, and who knows whom? Caches, inputs, graphs and checks are made here, in this order.

Twice in a start that measures what recordings take: once over the smallest caches, to be thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tokamak.cache.arena import Arena
from tokamak.cache.layout import lay_out
from tokamak.config.engine import EngineConfig
from tokamak.device.waits import HostWaits
from tokamak.errors import OptionError
from tokamak.graphs.backend import GraphBackend, make_backend
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest
from tokamak.graphs.request_graph import ReqGraph
from tokamak.graphs.streams import SideStreams
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.attention.tail import TailBuffers
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.ops.sample import argmax_rows
from tokamak.runner.check import ReplayCheck
from tokamak.runner.choice import PlainChoice
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import Exchange, config_text
from tokamak.runner.forward import EagerForward, Forward
from tokamak.runner.graph_cost import GraphCost, measured
from tokamak.runner.inputs import InputArena
from tokamak.runner.label import profiled_spans
from tokamak.runner.memory import StartPlan
from tokamak.runner.pads import PadWatch
from tokamak.runner.prepare import Preparation
from tokamak.runner.previous import Previous
from tokamak.runner.record import Kind, Recorder
from tokamak.runner.runner import ModelRunner
from tokamak.runner.shape import RunningTable
from tokamak.runner.stages import StagedEager
from tokamak.runner.tails import Tails
from tokamak.runner.verify import Room, Verifier
from tokamak.sampling.sampler import Sampler

Q_WIDTH = 1
"""Token rows of a decode request: nothing is drafted."""

WARM_UP_TOKENS = 17
WARM_UP_REQUESTS = 2

FIRST_REPLAYS_CHECKED = 3
"""On demand, verify_graphs compares so many replays of every bucket with the eager forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A runner over its caches, and what checks it before serving."""

    runner: ModelRunner
    verifier: Verifier

    def warm_up(self, config: EngineConfig) -> None:
        """Run a prefill and a decode step of dummy rows, so that kernels compile and lazy buffers appear."""
        limits = config.scheduler
        tokens = min(WARM_UP_TOKENS, limits.max_num_batched_tokens, config.model.max_model_len)
        requests = min(WARM_UP_REQUESTS, limits.max_num_seqs)
        for plan in (
            dummy_plan(prefill_tokens=tokens, decode_rows=0),
            dummy_plan(prefill_tokens=0, decode_rows=requests, q_width=Q_WIDTH),
        ):
            self.runner.step(plan)
        self.runner.recorder.open_outlets()


def wire(
    start: StartPlan,
    build: Build,
    model: Model,
    *,
    sampler: Sampler,
    exchange: Exchange,
    blocks: Sequence[int],
    pools: Literal["per_graph", "per_bucket"],
) -> Wired:
    """Make the caches, of so many blocks in each group, bind them to the model, and put a runner around it."""
    config, device = start.config, build.device
    graphs, limits, cache = config.graphs, config.scheduler, config.cache
    max_model_len = config.model.max_model_len
    layout = lay_out(start.groups, block_tokens=cache.block_tokens, blocks=blocks)
    views = Arena(layout, device).views()
    model.bind_caches(views)
    waits, spans = HostWaits(), profiled_spans()
    table, late_table = RunningTable(exchange.ranks), RunningTable(exchange.ranks)
    inputs = input_arena(start, build, model, waits=waits)
    streams, buffers = SideStreams(device), StaticBuffers()
    ladders = recordable_ladders(start, build, model)
    eager = eager_forward(model, inputs, ladders.late)
    tails = Tails(limits.max_num_seqs + 1, staged=eager.staged is not None)

    made = _make_graphs(start, build, model, ladders, streams, buffers, inputs, pools=pools)
    previous = Previous(slots=limits.max_num_seqs + 1)
    preparation = Preparation(
        model,
        inputs=inputs,
        attention=AttnBuilder(
            device,
            max_requests=limits.max_num_seqs,
            max_model_len=max_model_len,
            widths=(Q_WIDTH,),
        ),
        previous=previous,
        table=table,
        late_table=late_table,
        streams=streams,
        pads=PadWatch(
            [view for layers in views.values() for view in layers], poison=graphs.poison_pads
        ),
        spans=spans,
        tails=tails,
        tail_buffers=eager.tail_buffers,
    )
    forward = Forward(
        eager,
        requests=made.requests,
        tokens=made.tokens,
        decoder=made.decoder,
        eager_pad=graphs.eager_pad,
    )
    recorder = Recorder(
        graphs,
        requests=made.requests,
        tokens=made.tokens,
        decoder=made.decoder,
        choice=made.choice,
        off=ladders.off,
        preparation=preparation.untimed(),
        forward=forward,
        exchange=exchange,
        q_width=Q_WIDTH,
        max_model_len=max_model_len,
        estimate_bytes=start.memory.graph_estimate_bytes,
        cost_source=start.cost.source,
    )
    first = FIRST_REPLAYS_CHECKED if graphs.verify and graphs.when != "startup" else 0
    runner = ModelRunner(
        model,
        inputs=inputs,
        preparation=preparation,
        forward=forward,
        recorder=recorder,
        check=ReplayCheck(eager, rate=graphs.verify_rate, first=first),
        sampler=sampler,
        choice=made.choice,
        exchange=exchange,
        table=table,
        late_table=late_table,
        tails=tails,
        previous=previous,
        waits=waits,
        spans=spans,
    )
    room = Room(
        max_requests=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_tokens=cache.block_tokens,
        usable_blocks=min(blocks) - 1,
        groups=len(start.groups),
        vocab_tokens=config.model.facts.vocab_tokens,
        q_width=Q_WIDTH,
    )
    verifier = Verifier(
        room,
        inputs=inputs,
        preparation=preparation.untimed(),
        forward=forward,
        tails=tails,
        requests=ladders.requests,
        tokens=ladders.tokens,
        late=ladders.late,
    )
    return Wired(runner=runner, verifier=verifier)


class _Graphs(NamedTuple):
    """All recordings of a rank."""

    requests: ReqGraph
    tokens: TokenGraph
    decoder: DecoderGraph
    choice: PlainChoice


def _make_graphs(
    start: StartPlan,
    build: Build,
    model: Model,
    ladders: Recordable,
    streams: SideStreams,
    buffers: StaticBuffers,
    inputs: InputArena,
    *,
    pools: Literal["per_graph", "per_bucket"],
) -> _Graphs:
    """Graphs of what may be recorded, empty."""
    name, stages = start.config.graphs.backend, model.stages()
    early = model.regions() if stages is None else stages.early_regions()
    late = Manifest.of() if stages is None else stages.late_regions()

    def backend() -> GraphBackend:
        assert name != "none", "a graph without a back end has an empty ladder"
        return make_backend(name, build.device)

    requests = ReqGraph(
        "decode", ladders.requests, backend, model.regions(), streams, buffers, pools=pools
    )
    return _Graphs(
        requests=requests,
        tokens=TokenGraph("prefill", ladders.tokens, backend, early, streams, buffers, pools=pools),
        decoder=DecoderGraph("tail", ladders.late, backend, late, streams, buffers, pools=pools),
        choice=PlainChoice(
            ReqGraph(
                "choice", ladders.requests, backend, Manifest.of(), streams, buffers, pools=pools
            ),
            forward=requests,
            logits=model.logits,
            find=build.bind(argmax_rows),
            inputs=inputs,
        ),
    )


def input_arena(
    start: StartPlan, build: Build, model: Model, *, waits: HostWaits | None = None
) -> InputArena:
    """The inputs of the largest step that is planned for."""
    limits = start.config.scheduler
    return InputArena(
        build,
        start.groups,
        max_requests=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        block_tokens=start.config.cache.block_tokens,
        max_tail=limits.max_num_batched_tokens if model.stages() is not None else 0,
        waits=waits,
    )


def eager_forward(model: Model, inputs: InputArena, late: Ladder) -> EagerForward:
    """The model over what is published in an arena, whole or in its stages. late: sizes of recordings of tail rows."""
    stages = model.stages()
    if stages is None:
        return EagerForward(model, None)
    buffers = TailBuffers(
        inputs.tail_rows,
        inputs.tail_starts,
        window_starts=inputs.tail_first if stages.bounded else None,
        groups=inputs.buffers,
        carried_rows=max(late.buckets, default=0),
        carried_bytes=stages.carried_bytes,
    )
    return EagerForward(model, StagedEager(stages, buffers))


class Recordable(NamedTuple):
    """What may be recorded."""

    requests: Ladder
    tokens: Ladder
    late: Ladder
    off: dict[str, str]
    """Graphs that record nothing, by name, and why."""


def recordable_ladders(start: StartPlan, build: Build, model: Model) -> Recordable:
    """The ladders without what cannot be recorded."""
    off: dict[str, str] = {}
    ladders = {"decode": start.request_ladder, "prefill": start.token_ladder}
    if model.stages() is not None:
        ladders["tail"] = start.late_ladder
    if model.token_graph != "supported":
        off |= dict.fromkeys([name for name in ladders if name != "decode"], model.token_graph)
    for name in ladders:
        ops = build.unrecordable(token_graph=name != "decode")
        if ops:
            off[name] = f"{', '.join(ops)} reads numbers to the host"
    for name, ladder in ladders.items():
        if not ladder.buckets:
            off[name] = "no size is asked for"
        if name in off:
            ladders[name] = Ladder(())
    if start.config.graphs.verify and not any(ladder.buckets for ladder in ladders.values()):
        raise OptionError(
            "verify_graphs is true, but nothing can be recorded: "
            + "; ".join(f"{name}: {reason}" for name, reason in off.items()),
            hint="leave verify_graphs out, or choose other kernels",
        )
    late = ladders.get("tail", Ladder(()))
    return Recordable(ladders["decode"], ladders["prefill"], late, off)


def group_settings(start: StartPlan, build: Build, model: Model) -> str:
    """What every rank must have alike: what decides sizes, recordings and who repeats a step."""
    config = start.config
    graphs, limits = config.graphs, config.scheduler
    ladders = recordable_ladders(start, build, model)
    return config_text(
        {
            "req_graph_sizes": ladders.requests,
            "token_graph_sizes": ladders.tokens,
            "tail_graph_sizes": ladders.late,
        },
        {
            "model": config.model.facts.architecture,
            "dtype": config.model.dtype,
            "kv_cache_dtype": config.cache.dtype,
            "bounded_replay": config.model.bounded_replay,
            "device": config.model.device,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "graphs": graphs.when,
            "token_graph_eager_pad": graphs.eager_pad,
            "graphs_allow_missing_bucket": graphs.allow_missing_bucket,
            "verify_graphs": graphs.verify,
            "verify_graphs_rate": graphs.verify_rate,
            "q_width": Q_WIDTH,
        },
    )


def measure_cost(
    start: StartPlan, build: Build, model: Model, *, sampler: Sampler, exchange: Exchange
) -> GraphCost | None:
    """What recordings take: the two largest buckets of the larger graph in one pool, over the smallest caches.

    The same of late layers' graph, if there is one; what takes more counts.

    None if one of them cannot be recorded and may be left out, or there is none.
    """
    wired = wire(
        start,
        build,
        model,
        sampler=sampler,
        exchange=exchange,
        blocks=[2] * len(start.groups),
        pools="per_graph",
    )
    wired.warm_up(start.config)
    recorder = wired.runner.recorder
    pads = start.config.graphs.eager_pad
    tokens = () if pads else recorder.token_buckets.ladder.buckets
    late = () if pads else recorder.late_buckets.ladder.buckets
    rows: dict[Kind, dict[int, int]] = {
        "token": {size: size for size in tokens},
        "request": {size: size * Q_WIDTH for size in recorder.request_buckets.ladder.buckets},
    }
    kind = max(rows, key=lambda kind: max(rows[kind].values(), default=0))
    cost = _measured(recorder, kind, rows[kind])
    if cost is None or not late:
        return cost
    behind = _measured(recorder, "decoder", {size: size for size in late})
    return None if behind is None else cost.at_least(behind)


def _measured(recorder: Recorder, kind: Kind, rows: Mapping[int, int]) -> GraphCost | None:
    """What recordings of one graph take. rows: token rows by bucket."""
    largest = sorted(rows, reverse=True)[:2]
    found = [recorder.measure(kind, size) for size in largest]
    held = [pool_bytes for pool_bytes in found if pool_bytes is not None]
    if not held or len(held) < len(largest):
        return None
    return measured(
        rows_a=rows[largest[0]],
        bytes_a=held[0],
        rows_b=rows[largest[-1]],
        bytes_b=held[-1],
    )
