"""Which parts has a runner, and who knows whom? Caches, inputs, graphs and checks are made here, in this order.

Twice in a start that measures what recordings take: once over the smallest caches, to be thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokamak.cache.arena import Arena
from tokamak.cache.layout import lay_out
from tokamak.config.engine import EngineConfig
from tokamak.core.plan import Mode
from tokamak.device.waits import HostWaits
from tokamak.errors import OptionError
from tokamak.graphs.backend import GraphBackend, make_backend
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest
from tokamak.graphs.request_graph import ReqGraph
from tokamak.graphs.streams import SideStreams
from tokamak.graphs.token_graph import TokenGraph
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.ops.sample import argmax_rows
from tokamak.runner.check import ReplayCheck
from tokamak.runner.choice import PlainChoice
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.exchange import Exchange, config_text
from tokamak.runner.forward import Forward
from tokamak.runner.graph_cost import GraphCost, measured
from tokamak.runner.inputs import InputArena
from tokamak.runner.label import profiled_spans
from tokamak.runner.memory import StartPlan
from tokamak.runner.pads import PadWatch
from tokamak.runner.prepare import Preparation
from tokamak.runner.previous import Previous
from tokamak.runner.record import Recorder
from tokamak.runner.runner import ModelRunner
from tokamak.runner.shape import RunningTable
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
    waits, spans, table = HostWaits(), profiled_spans(), RunningTable(exchange.ranks)
    inputs = InputArena(
        build,
        start.groups,
        max_requests=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        block_tokens=cache.block_tokens,
        waits=waits,
    )
    streams, buffers = SideStreams(device), StaticBuffers()
    request_ladder, token_ladder, off = recordable_ladders(start, build, model)

    def backend() -> GraphBackend:
        assert graphs.backend != "none", "a graph without a back end has an empty ladder"
        return make_backend(graphs.backend, device)

    requests = ReqGraph(
        "decode", request_ladder, backend, model.regions(), streams, buffers, pools=pools
    )
    tokens = TokenGraph(
        "prefill", token_ladder, backend, model.regions(), streams, buffers, pools=pools
    )
    choice = PlainChoice(
        ReqGraph("choice", request_ladder, backend, Manifest.of(), streams, buffers, pools=pools),
        forward=requests,
        logits=model.logits,
        find=build.bind(argmax_rows),
        inputs=inputs,
    )
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
        streams=streams,
        pads=PadWatch(
            [view for layers in views.values() for view in layers], poison=graphs.poison_pads
        ),
        spans=spans,
    )
    forward = Forward(model, requests=requests, tokens=tokens, eager_pad=graphs.eager_pad)
    recorder = Recorder(
        graphs,
        requests=requests,
        tokens=tokens,
        choice=choice,
        off=off,
        preparation=preparation.untimed(),
        forward=forward,
        exchange=exchange,
        q_width=Q_WIDTH,
        max_model_len=max_model_len,
        estimate_bytes=start.memory.graph_estimate_bytes,
        cost_source=start.cost.source,
    )
    first = FIRST_REPLAYS_CHECKED if graphs.verify and graphs.when == "on-demand" else 0
    runner = ModelRunner(
        model,
        inputs=inputs,
        preparation=preparation,
        forward=forward,
        recorder=recorder,
        check=ReplayCheck(forward.eager, rate=graphs.verify_rate, first=first),
        sampler=sampler,
        choice=choice,
        exchange=exchange,
        table=table,
        previous=previous,
        waits=waits,
        spans=spans,
    )
    room = Room(
        max_requests=limits.max_num_seqs,
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
        requests=request_ladder,
        tokens=token_ladder,
    )
    return Wired(runner=runner, verifier=verifier)


def recordable_ladders(
    start: StartPlan, build: Build, model: Model
) -> tuple[Ladder, Ladder, dict[str, str]]:
    """The request and token ladders without what cannot be recorded, and why by the graph's name."""
    off: dict[str, str] = {}
    ladders = {"decode": start.request_ladder, "prefill": start.token_ladder}
    if model.token_graph != "supported":
        off["prefill"] = model.token_graph
    for name in ladders:
        ops = build.unrecordable(token_graph=name == "prefill")
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
    return ladders["decode"], ladders["prefill"], off


def group_settings(start: StartPlan, build: Build, model: Model) -> str:
    """What every rank must have alike: what decides sizes, recordings and who repeats a step."""
    config = start.config
    graphs, limits = config.graphs, config.scheduler
    requests, tokens, _ = recordable_ladders(start, build, model)
    return config_text(
        {"req_graph_sizes": requests, "token_graph_sizes": tokens},
        {
            "model": config.model.facts.architecture,
            "dtype": config.model.dtype,
            "kv_cache_dtype": config.cache.dtype,
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
    rows = {
        Mode.TOKEN_GRAPH: {size: size for size in recorder.token_buckets.ladder.buckets},
        Mode.REQUEST_GRAPH: {
            size: size * Q_WIDTH for size in recorder.request_buckets.ladder.buckets
        },
    }
    if start.config.graphs.eager_pad:
        rows[Mode.TOKEN_GRAPH] = {}
    mode = max(rows, key=lambda mode: max(rows[mode].values(), default=0))
    largest = sorted(rows[mode], reverse=True)[:2]
    found = [recorder.measure(mode, size) for size in largest]
    held = [pool_bytes for pool_bytes in found if pool_bytes is not None]
    if not held or len(held) < len(largest):
        return None
    return measured(
        rows_a=rows[mode][largest[0]],
        bytes_a=held[0],
        rows_b=rows[mode][largest[-1]],
        bytes_b=held[-1],
    )
