"""Which kernels will a model launch, and can they be compiled before it does? `python -m tokamak.runner.compile_ahead`.

Reads an Order from standard input. The model is built without numbers, on PyTorch's `meta` device, and run at sizes
that stand for all it will run; launches are noted instead of made. Then one process per core compiles what was noted
into Triton's cache on disk, where the engine finds it. No process here uses the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from tokamak.config.engine import EngineConfig
from tokamak.core.context import StepContext, installed
from tokamak.core.plan import Mode
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import device_facts
from tokamak.graphs.region import EagerRegion, begin_forward
from tokamak.layers.model import Model
from tokamak.ops.sample import argmax_rows, token_weights
from tokamak.ops.triton_launches import Job, compile_all, noted_launches, target_of
from tokamak.runner.ahead import Order, finished
from tokamak.runner.assemble import Planned, make_build, plan_rank
from tokamak.runner.exchange import LocalExchange
from tokamak.runner.record import Recorder
from tokamak.runner.wiring import wire
from tokamak.sampling.sampler import Sampler

META = torch.device("meta")

PREFILL_SIZES = (1, 17, 128)
DECODE_SIZES = (1, 2, 4, 8, 16, 32)
"""Token rows of steps that are noted beside the sizes of recordings: kernels tell few rows from many."""


@torch.inference_mode()
def kernels_of(config: EngineConfig, multiprocessors: int) -> list[Job]:
    """Jobs that compile what the engine of this config launches before it serves, in the order it does.

    Triton's driver stays the one that has no device.
    """
    target = target_of(device_facts(config.model.device))
    with noted_launches(target, multiprocessors) as jobs, _regions_in_place():
        planned = plan_rank(config, replace(make_build(config), device=META))
        _load_nothing(planned.model)
        recorder = _recorder(planned)
        choose = planned.build.bind(argmax_rows)
        for mode, size in _sizes(config, recorder):
            choose(_scores(planned.model, recorder.staging(mode, size)))
    return jobs


def _sizes(config: EngineConfig, recorder: Recorder) -> list[tuple[Mode, int]]:
    """Steps that stand for all: every request bucket, and of token buckets the smallest and the largest."""
    limits = config.scheduler
    tokens = recorder.token_buckets.ladder.buckets
    prefills = {size for size in PREFILL_SIZES if size <= limits.max_num_batched_tokens}
    prefills |= {*tokens[:1], *tokens[-1:]}
    decodes = {size for size in DECODE_SIZES if size <= limits.max_num_seqs}
    decodes |= {*recorder.request_buckets.ladder.buckets}
    return [
        *((Mode.TOKEN_GRAPH, size) for size in sorted(prefills)),
        *((Mode.REQUEST_GRAPH, size) for size in sorted(decodes)),
    ]


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


def _load_nothing(model: Model) -> None:
    """Give every parameter weights of its shapes, without numbers."""
    for parameter, _ in model.weights().values():
        parameter.load(
            [DenseWeight(torch.empty(shape, device=META)) for shape in parameter.part_shapes]
        )


def _recorder(planned: Planned) -> Recorder:
    """Stages steps over the smallest caches; its recordings would be simulated ones."""
    start, build = planned.start, planned.build
    graphs = replace(start.config.graphs, backend="sim")
    start = replace(start, config=replace(start.config, graphs=graphs))
    sampler = Sampler(
        vocab_tokens=start.config.model.facts.vocab_tokens,
        slots=start.config.scheduler.max_num_seqs + 1,
        device=META,
        grammar=None,
        weigh=build.bind(token_weights),
        find=build.bind(argmax_rows),
    )
    wired = wire(
        start,
        build,
        planned.model,
        sampler=sampler,
        exchange=LocalExchange(),
        total_blocks=2,
        pools="per_graph",
    )
    return wired.runner.recorder


def _scores(model: Model, context: StepContext) -> Tensor:
    """The scores of one forward's rows."""
    with installed(context):
        begin_forward(context)
        return model.logits(model(context.inputs))


def main() -> int:
    """Read an order, compile, and leave a mark that it was done; the exit code."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    facts = device_facts(order.config.model.device)
    jobs = kernels_of(order.config, order.multiprocessors)
    if any(compile_all(jobs, facts.cores)):
        return 1
    finished(order.config, len(jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
