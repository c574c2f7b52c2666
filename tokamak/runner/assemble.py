"""A config becomes a model with weights, caches, graphs and a runner, in one readable order.

The only file above `models` that opens the registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from tokamak.cache.groups import group_sub_caches
from tokamak.checkpoint.load import load_model, load_random
from tokamak.checkpoint.source import Checkpoint, open_checkpoint
from tokamak.checkpoint.tokenizer import load_tokenizer
from tokamak.config.engine import EngineConfig
from tokamak.core.request import SamplingParams
from tokamak.device.facts import device_facts
from tokamak.errors import GraphMismatch, OptionError
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.layers.moe import StackedExperts
from tokamak.layers.plain import Plain
from tokamak.layers.table import Table
from tokamak.models.registry import find
from tokamak.ops.load import load_backends
from tokamak.ops.sample import argmax_rows, draw_rows, token_weights
from tokamak.runner.ahead import CompileAhead
from tokamak.runner.dummy import NULL_SLOT
from tokamak.runner.exchange import Exchange, LocalExchange
from tokamak.runner.graph_cost import GraphCost, cost_path, default_cost, save_cost, saved_cost
from tokamak.runner.memory import StartPlan, plan_start
from tokamak.runner.runner import ModelRunner
from tokamak.runner.verify import Verdict
from tokamak.runner.wiring import Wired, group_settings, measure_cost, wire
from tokamak.sampling.grammar_state import GrammarFactory
from tokamak.sampling.sampler import Sampler
from tokamak.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda", 0)}
"""Of the GPUs that CUDA shows this process, it uses the first, whose facts the config was settled with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A loaded rank: everything a step needs, and what was decided on the way."""

    model: Model
    runner: ModelRunner
    build: Build
    start: StartPlan
    verdicts: tuple[Verdict, ...]
    """What the verification of the recordings found; empty if none was asked for."""
    load_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A model without weights, and every size of its start."""

    checkpoint: Checkpoint
    model: Model
    build: Build
    start: StartPlan
    cost_path: Path
    """Where what recordings take is kept between starts."""


def plan_rank(config: EngineConfig, build: Build | None = None) -> Planned:
    """Build a model without weights and settle the sizes of its start; the half of `assemble` that needs neither.

    Args:
        config: what was decided.
        build: what layers are built from; None makes it from the config.

    Raises:
        ModelError: the checkpoint is unsound, or of a kind we do not implement.
        OptionError: the cache cannot hold one request of max_model_len, or have the format that was asked for, or
            the model has no late layers that could run for less.
    """
    build = build or make_build(config)
    checkpoint = open_checkpoint(Path(config.model.path))
    family = find(config.model.facts.architecture)
    _refuse_cache_dtype(config, family.cache_dtypes)
    model = family.from_config(checkpoint.config, build).eval()
    _refuse_bounded_replay(config, model)
    path = cost_path(config, checkpoint.config)
    cost = saved_cost(path) or _default_cost(config, build, model)
    groups = group_sub_caches(model.sub_caches())
    return Planned(
        checkpoint=checkpoint,
        model=model,
        build=build,
        start=plan_start(config, groups, cost, stages=model.stages()),
        cost_path=path,
    )


def assemble(
    config: EngineConfig,
    exchange: Exchange | None = None,
    *,
    ahead: CompileAhead | None = None,
) -> Rank:
    """Build, load, warm up and record a rank.

    Args:
        config: what was decided.
        exchange: how this rank hears of its data-parallel peers; None has none.
        ahead: who compiles kernels for this config; None starts one where it is needed.

    Raises:
        ModelError: the checkpoint is unsound, or of a kind we do not implement.
        OptionError: the cache cannot hold one request of max_model_len.
        GraphError: a bucket cannot be recorded, or is not what the eager forward gives.
        GroupError: ranks have other settings, or one is gone.
    """
    load_s: dict[str, float] = {}
    exchange = exchange or LocalExchange()
    with ahead or CompileAhead(config) as ahead:
        with _timed(load_s, "build"):
            planned = plan_rank(config)
            model, build, start = planned.model, planned.build, planned.start
            if ahead.running:
                gpu = torch.cuda.get_device_properties(build.device)
                ahead.order(gpu.multi_processor_count)
            exchange.introduce(group_settings(start, build, model))
        with _timed(load_s, "weights"):
            if config.model.load_format == "random":
                load_random(model, config.model.seed, build.device, planned.checkpoint.scheme)
            else:
                load_model(model, planned.checkpoint, build.device)
        with _timed(load_s, "tokenizer"):
            is_random = config.model.load_format == "random"
            tokenizer = load_tokenizer(
                Path(config.model.path), load_format=config.model.load_format
            )
            model.take_tokenizer(None if is_random else tokenizer)
            grammar = _make_grammar(config, tokenizer)
        with _timed(load_s, "kernels"):
            ahead.wait()
    with _timed(load_s, "caches"):
        sampler = _make_sampler(config, build, grammar)
        start = _with_measured_cost(planned, sampler, exchange)
        wired = wire(
            start,
            build,
            model,
            sampler=sampler,
            exchange=exchange,
            blocks=start.memory.group_blocks,
            pools=config.graphs.pools,
        )
    with _timed(load_s, "warm_up"):
        wired.warm_up(start.config)
    with _timed(load_s, "graphs"):
        verdicts: tuple[Verdict, ...] = ()
        if config.graphs.when == "startup":
            wired.runner.recorder.record_all()
            verdicts = _verified(wired) if config.graphs.verify else ()
        elif config.graphs.when == "serving":
            wired.runner.recorder.put_off()
    return Rank(
        model=model,
        runner=wired.runner,
        build=build,
        start=start,
        verdicts=verdicts,
        load_s=load_s,
    )


def _refuse_cache_dtype(config: EngineConfig, known: tuple[str, ...]) -> None:
    """Raise OptionError for a format of caches that is neither the model's own nor one its family knows."""
    asked, own = config.cache.dtype, config.model.dtype
    if asked != own and asked not in known:
        others = f"{own} or {' or '.join(known)}" if known else f"{own}, the format of dtype, alone"
        raise OptionError(
            f"kv_cache_dtype is {asked}, but {config.model.facts.architecture} keeps its caches in {others}",
            hint="use kv_cache_dtype=auto, or leave it out",
        )


def _refuse_bounded_replay(config: EngineConfig, model: Model) -> None:
    """Raise OptionError where it is asked for, and all rows of a prompt need all layers."""
    if config.model.bounded_replay and model.stages() is None:
        raise OptionError(
            f"bounded_replay is true, but {config.model.facts.architecture} "
            f"({config.model.served_names[0]}) has no late layers that could run for a part of a prompt",
            hint="leave it out",
        )


def make_build(config: EngineConfig) -> Build:
    """The facts and choices layers are built from."""
    load_backends()
    return Build(
        facts=device_facts(config.model.device),
        device=DEVICES[config.model.device],
        dtype=DTYPES[config.model.dtype],
        cache_dtype=config.cache.dtype,
        exact=config.model.exact,
        max_model_len=config.model.max_model_len,
        bounded_replay=config.model.bounded_replay,
        host_tables=config.model.tables == "host",
        prefer=dict(config.kernels.prefer),
    )


def _default_cost(config: EngineConfig, build: Build, model: Model) -> GraphCost:
    shapes = [
        parameter.row_shapes
        if isinstance(parameter, StackedExperts | Plain | Table)
        else parameter.part_shapes
        for parameter, _ in model.weights().values()
    ]
    return default_cost(
        chain.from_iterable(shapes),
        vocab_tokens=config.model.facts.vocab_tokens,
        number_bytes=build.dtype.itemsize,
    )


def _with_measured_cost(planned: Planned, sampler: Sampler, exchange: Exchange) -> StartPlan:
    """A start behind which everything is recorded measures first what that takes, once per model and machine (GR-24).

    Recording is collective, so a rank whose cost is saved measures beside one that has none.
    """
    start = planned.start
    if not start.config.graphs.records_all or exchange.vote(start.cost.source == "saved"):
        return start
    cost = measure_cost(start, planned.build, planned.model, sampler=sampler, exchange=exchange)
    if cost is None:
        return start
    save_cost(planned.cost_path, cost)
    return plan_start(start.config, start.groups, cost, stages=planned.model.stages())


def _verified(wired: Wired) -> tuple[Verdict, ...]:
    """The verdicts, if all are good."""
    verdicts = wired.verifier.verify()
    bad = [verdict for verdict in verdicts if not verdict.ok]
    if bad:
        worst = bad[0]
        raise GraphMismatch(
            f"{len(bad)} of {len(verdicts)} verified sizes differ from the eager forward, first the "
            f"{worst.graph} bucket {worst.bucket} at size {worst.size}, by {worst.worst:.3g} of the row's "
            "largest number",
            hint="serve with graphs=off; token_graph_eager_pad=true tells a fault of padding from one of recording",
        )
    return verdicts


def _make_grammar(config: EngineConfig, tokenizer: Tokenizer) -> GrammarFactory:
    return GrammarFactory(
        tokenizer.to_json(),
        vocab_tokens=config.model.facts.vocab_tokens,
        eos_ids=tokenizer.eos_ids,
    )


def _make_sampler(config: EngineConfig, build: Build, grammar: GrammarFactory) -> Sampler:
    sampler = Sampler(
        vocab_tokens=config.model.facts.vocab_tokens,
        slots=config.scheduler.max_num_seqs + 1,
        device=build.device,
        grammar=grammar,
        entropy=config.model.seed.to_bytes(8, "little"),
        weigh=build.bind(token_weights),
        find=build.bind(argmax_rows),
        draw_all=build.bind(draw_rows),
    )
    sampler.admit(
        NULL_SLOT,
        request_id="dummy",
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=1,
        stop_ids=frozenset(),
        prompt_tokens=0,
        output_ids=(),
    )
    return sampler


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start
