"""Which kernels will a model launch, and can they be compiled before it does? `python -m tokamak.runner.compile_ahead`.

Reads an Order from standard input. The model is built without numbers, on PyTorch's `meta` device, and run at sizes
that stand for all it will run; launches are noted instead of made. Meanwhile a process per core compiles what was noted
into Triton's cache on disk, where the engine finds it. No process here uses the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import torch

from tokamak.cache.arena import Arena
from tokamak.cache.layout import lay_out
from tokamak.checkpoint.load import load_nothing
from tokamak.config.engine import EngineConfig
from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.device.facts import device_facts
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import EagerRegion
from tokamak.graphs.streams import SideStreams
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.build import Build
from tokamak.ops.load import load_backends
from tokamak.ops.sample import TABLE_COLUMNS, argmax_rows, draw_rows, token_weights
from tokamak.ops.triton_launches import Compilers, Job, noted_launches, target_of
from tokamak.runner.ahead import Order, finished
from tokamak.runner.assemble import Planned, make_build, plan_rank
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.forward import EagerForward
from tokamak.runner.memory import StartPlan
from tokamak.runner.pads import PadWatch
from tokamak.runner.prepare import Preparation
from tokamak.runner.previous import Previous
from tokamak.runner.record import LONG_CONTEXT_TOKENS
from tokamak.runner.shape import RunningTable, lone_late, lone_shape
from tokamak.runner.tails import Tails
from tokamak.runner.wiring import Q_WIDTH, eager_forward, input_arena
from tokamak.telemetry.spans import Spans

META = torch.device("meta")

PREFILL_SIZES = (1, 17, 128, 1024, 8192)
DECODE_SIZES = (1, 2, 4, 8, 16, 32)
"""Token rows of steps that are noted beside the sizes of recordings: kernels tell few rows from many."""


@torch.inference_mode()
def note_kernels(
    config: EngineConfig, multiprocessors: int, start: Callable[[Job], object]
) -> None:
    """Start jobs that compile what the engine of this config launches, in about the order it does.

    Triton's driver stays the one that has no device.
    """
    target = target_of(device_facts(config.model.device))
    noted = noted_launches(target, multiprocessors, start)
    with noted, _regions_in_place(), _without_pytorchs_compiler():
        planned = plan_rank(config, replace(make_build(config), device=META))
        model, build = planned.model, planned.build
        load_nothing(model, META, planned.checkpoint.scheme)
        model.take_tokenizer(None)
        prepare, forward = _prepared(planned)
        choose, weigh = build.bind(argmax_rows), build.bind(token_weights)
        # First, as it takes longest to compile.
        _draw_once(config, build)
        for plan, shape in _steps(planned.start, staged=model.stages() is not None):
            hidden = forward(prepare(plan, shape))
            assert hidden is not None, "all rows of dummy steps go through late layers"
            scores = model.logits(hidden)
            _, peaks = choose(scores)
            weigh(scores, peaks, peaks)


def _draw_once(config: EngineConfig, build: Build) -> None:
    """Draw for one row: the kernels are those of any number of rows."""
    scores = torch.empty((1, config.model.facts.vocab_tokens), device=META)
    table = torch.empty((1, TABLE_COLUMNS), dtype=torch.int64, device=META)
    first = torch.empty(1, dtype=torch.int32, device=META)
    build.bind(draw_rows)(scores, table, first, first)


def _steps(start: StartPlan, *, staged: bool) -> Iterator[tuple[StepPlan, StepShape]]:
    """Steps that stand for all: every bucket, sizes between which kernels choose another form, and both kinds mixed.

    Late layers of a model in stages run for all rows of each.
    """
    limits, longest = start.config.scheduler, start.config.model.max_model_len
    most = limits.max_num_batched_tokens
    prefills = {size for size in PREFILL_SIZES if size <= most} | {*start.token_ladder.buckets}
    prefills |= {*start.late_ladder.buckets}
    decodes = {size for size in DECODE_SIZES if size <= limits.max_num_seqs}
    decodes |= {*start.request_ladder.buckets}
    for tokens in sorted(prefills):
        yield _step(tokens, 0, min(tokens, longest), staged=staged)
    for requests in sorted(decodes):
        yield _step(0, requests, min(LONG_CONTEXT_TOKENS, longest), staged=staged)
    for requests in sorted(decodes):
        if requests < min(limits.max_num_seqs, most):
            yield _step(1, requests, min(LONG_CONTEXT_TOKENS, longest), staged=staged)


def _step(
    prefill_tokens: int, decode_rows: int, context_tokens: int, *, staged: bool
) -> tuple[StepPlan, StepShape]:
    """A plan of dummy rows, and its shape without padding."""
    plan = dummy_plan(
        prefill_tokens=prefill_tokens,
        decode_rows=decode_rows,
        q_width=Q_WIDTH,
        context_tokens=context_tokens,
    )
    size = (plan.scheduled_requests, plan.scheduled_tokens)
    shape = lone_shape(
        Mode.TOKEN_GRAPH if prefill_tokens else Mode.REQUEST_GRAPH,
        scheduled=size,
        running=size,
        q_width=0 if prefill_tokens else Q_WIDTH,
        dummy=True,
        why="compiling",
        late=lone_late(Mode.EAGER, size[1], size[1]) if staged and prefill_tokens else None,
    )
    return plan, shape


@contextmanager
def _without_pytorchs_compiler() -> Iterator[None]:
    """Inside, nobody imports `torch._dynamo`, which takes as long as many kernels.

    PyTorch's operators on tensors without numbers import it for one function alone, which keeps it away from them.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(name)
    stand_in.disable = lambda fn, *_, **__: fn
    sys.modules[name] = torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[name], torch._dynamo


@contextmanager
def _regions_in_place() -> Iterator[None]:
    """Inside, eager regions run their bodies: on the meta device an operator only says what shapes come out."""
    call = EagerRegion.__call__
    EagerRegion.__call__ = _run_body
    try:
        yield
    finally:
        EagerRegion.__call__ = call


def _run_body(self: EagerRegion, *args: Any) -> None:
    self.run(args)


def _prepared(
    planned: Planned,
) -> tuple[Callable[[StepPlan, StepShape], StepContext], EagerForward]:
    """Prepares steps over the smallest caches, which are bound to the model; and runs them."""
    start, build, model = planned.start, planned.build, planned.model
    limits, block_tokens = start.config.scheduler, start.config.cache.block_tokens
    layout = lay_out(start.groups, block_tokens=block_tokens, blocks=[2] * len(start.groups))
    model.bind_caches(Arena(layout, META).views())
    inputs = input_arena(start, build, model)
    forward = eager_forward(model, inputs, Ladder(()))
    attention = AttnBuilder(
        META,
        max_requests=limits.max_num_seqs,
        max_model_len=start.config.model.max_model_len,
        widths=(Q_WIDTH,),
    )
    preparation = Preparation(
        model,
        inputs=inputs,
        attention=attention,
        previous=Previous(slots=limits.max_num_seqs + 1),
        table=RunningTable(1),
        late_table=RunningTable(1),
        streams=SideStreams(META),
        pads=PadWatch([], poison=False),
        spans=Spans(),
        tails=Tails(limits.max_num_seqs + 1, staged=forward.staged is not None),
        tail_buffers=forward.tail_buffers,
    )
    return preparation.prepare, forward


def main() -> int:
    """Read an order, compile, and leave a mark that it was done; the exit code."""
    load_backends()  # Takes a second, in which the engine finds out what to order.
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    facts = device_facts(order.config.model.device)
    compilers = Compilers(facts.cores)
    note_kernels(order.config, order.multiprocessors, compilers.start)
    compilers.finish()
    if compilers.failed:
        return 1
    finished(order.config, compilers.started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
