"""Do compiled kernels replay as native calls, in the pool, with the numbers of an eager run?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.graph_models import CPU, ToyArena, ToyModel, eager, prompts, small_sim
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import cpu_facts
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest
from tokamak.graphs.sim import SimBackend
from tokamak.graphs.token_graph import TokenGraph
from tokamak.layers.linear import Linear
from tokamak.ops.activation import silu_mul
from tokamak.ops.embedding import embed
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.calls import LISTENING
from tokamak.ops.load import load_backends
from tokamak.ops.norm import add_rms_norm, rms_norm

load_backends()

WIDTH, INNER = 64, 128
needs_kernels = pytest.mark.skipif(not fits(cpu_facts()), reason="kernels cannot be compiled here")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class KernelModel:
    """Two gated layers of bound ops."""

    def __init__(self, dtype):
        build = a_build(dtype)
        generator = torch.Generator().manual_seed(3)

        def weight(*shape):
            return (torch.randn(shape, generator=generator) / WIDTH**0.5).to(dtype)

        self.dtype = dtype
        self.embed, self.norm = build.bind(embed), build.bind(rms_norm)
        self.add_norm, self.activate = build.bind(add_rms_norm), build.bind(silu_mul)
        self.table = weight(50, WIDTH)
        self.scale = weight(WIDTH)
        self.up = [Linear(build, WIDTH, [2 * INNER]) for _ in range(2)]
        self.down = [Linear(build, INNER, [WIDTH]) for _ in range(2)]
        for layers, shape in ((self.up, (2 * INNER, WIDTH)), (self.down, (WIDTH, INNER))):
            for layer in layers:
                layer.load([DenseWeight(weight(*shape))])

    def forward(self, step):
        residual = self.embed(step.token_ids, self.table)
        x = self.norm(residual, self.scale, 1e-6)
        for up, down in zip(self.up, self.down, strict=True):
            x = down(self.activate(up(x)))
            x = self.add_norm(x, residual, self.scale, 1e-6)
        return x

    def with_torch_between(self, step):
        x = self.forward(step)
        y = torch.roll(x, 1, dims=0) * 2
        return self.norm(y, self.scale, 1e-6) + x


def a_graph(arena, dtype, backend=small_sim):
    graph = TokenGraph(
        "kernels", Ladder((4, 8)), backend, Manifest.of(), arena.streams, StaticBuffers()
    )
    graph.open_outlets(torch.empty(1, WIDTH, dtype=dtype), 8)
    return graph


@needs_kernels
@every_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("forward", ["forward", "with_torch_between"])
def test_kernels_replay_with_the_numbers_of_an_eager_run(dtype, threads, forward):
    model, arena = KernelModel(dtype), ToyArena(ToyModel())
    run = getattr(model, forward)
    graph = a_graph(arena, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for bucket in (8, 4):
            graph.record(bucket, run, arena.prefill(prompts(bucket), running_tokens=bucket))

        for seed, bucket in enumerate((4, 8, 4, 8)):
            ctx = arena.prefill(prompts(bucket - 1, seed=seed), running_tokens=bucket)
            expected = eager(run, ctx)
            graph.poison()
            assert torch.equal(graph.replay(bucket, ctx), expected)
    torch.set_num_threads(before)


@needs_kernels
def test_a_forward_of_kernels_alone_is_one_native_call():
    model, arena = KernelModel(torch.float32), ToyArena(ToyModel())
    graph = a_graph(arena, torch.float32)

    graph.record(8, model.forward, arena.prefill(prompts(8), running_tokens=8))

    (segment,) = graph._recordings[8].segments
    assert segment.kernel_runs == 1
    assert segment.op_count == 1, "the copy into the outlet"
    assert graph.report().native


@needs_kernels
def test_torch_ops_divide_kernels_into_several_native_calls_in_order():
    model, arena = KernelModel(torch.float32), ToyArena(ToyModel())
    graph = a_graph(arena, torch.float32)

    graph.record(8, model.with_torch_between, arena.prefill(prompts(8), running_tokens=8))

    (segment,) = graph._recordings[8].segments
    assert segment.kernel_runs == 2
    assert not graph.report().native


@needs_kernels
def test_kernels_take_their_memory_from_the_pool_and_give_it_back():
    model, arena = KernelModel(torch.float32), ToyArena(ToyModel())
    backends = []

    def backend():
        backends.append(SimBackend(CPU, chunk_bytes=1 << 14))
        return backends[-1]

    graph = a_graph(arena, torch.float32, backend)
    many = KernelModel(torch.float32)
    many.up, many.down = many.up * 8, many.down * 8

    graph.record(8, model.forward, arena.prefill(prompts(8), running_tokens=8))
    shallow = graph.pool_bytes()
    graph.record(4, many.forward, arena.prefill(prompts(4), running_tokens=4))

    assert shallow > 0
    assert graph.pool_bytes() == shallow


@needs_kernels
def test_nobody_listens_to_kernels_between_and_after_recordings():
    model, arena = KernelModel(torch.float32), ToyArena(ToyModel())
    graph = a_graph(arena, torch.float32)
    heard = []

    def forward(step):
        heard.append(LISTENING.calls is not None)
        return model.forward(step)

    graph.record(8, forward, arena.prefill(prompts(8), running_tokens=8))

    assert heard == [False, True]
    assert LISTENING.calls is None


def test_declaring_regions_and_recording_does_not_import_the_compiler():
    program = (
        "import sys, torch\n"
        "from tests.support.graph_models import *\n"
        "rig = a_rig(ExpertToy)\n"
        "record_tokens(rig, 8)\n"
        "rig.tokens.replay(8, rig.arena.prefill(prompts(8), running_tokens=8))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "print('recorded', rig.tokens.buckets())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )

    assert done.stdout == "recorded (8,)\n", done.stderr
