"""Does every backend of every op that fits this device compute what the reference does, without waits, recorded or not?"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.op_cases import (
    gap,
    moved,
    ops_with_cases,
    outcome_of,
    outcome_on,
    random_step_cases,
)
from tokamak.device.facts import device_facts
from tokamak.ops.case import tolerance_of
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
GPU = torch.device("cuda", 0)
RANDOM_STEPS = 500

load_backends()
every_case = pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op.name}: {case}")
        for op, cases in ops_with_cases()
        for case in cases
    ],
)


@cache
def fitting(op_name, cache_dtype=None):
    """The backends of an op that this device can choose from, for caches of another format than the rows."""
    facts = device_facts("cuda")
    found = [each for each in OPS[op_name].backends if each.fits(facts)]
    return [each for each in found if cache_dtype is None or each.takes(facts, cache_dtype)]


def reads_the_host(op, backend, case):
    """The fallback of devices without a kernel of ours attends request by request where rows are ragged."""
    if (op.name, backend.name) != ("paged_attention", "padded"):
        return False
    q_width = case.make()[6]
    assert isinstance(q_width, int)
    return q_width == 0


@pytest.mark.parametrize("op", [op for op, _ in ops_with_cases()], ids=lambda op: op.name)
def test_every_op_has_a_backend_for_this_device(op):
    assert fitting(op.name)


@every_case
@torch.inference_mode()
def test_backends_agree_with_the_reference_and_wait_for_nothing(op, case):
    expected = case.outcome(op.reference)

    for backend in fitting(op.name, case.cache_dtype):
        inputs = moved(case.make(), GPU)
        with nullcontext() if reads_the_host(op, backend, case) else no_host_wait():
            found = outcome_of(case, backend.call(*inputs), inputs)
        assert gap(found, expected) <= case.tolerance, backend.name


@every_case
@torch.inference_mode()
def test_a_recording_does_what_the_call_does(op, case):
    expected = case.outcome(op.reference)

    for backend in fitting(op.name, case.cache_dtype):
        if not backend.recordable or reads_the_host(op, backend, case):
            continue
        inputs, fresh = moved(case.make(), GPU), moved(case.make(), GPU)
        backend.call(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            # No rows, no launch.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(graph):
                result = backend.call(*inputs)
        for place in case.changed:
            if fresh[place] is not None:
                inputs[place].copy_(fresh[place])
        graph.replay()
        found = outcome_of(case, result, inputs)
        assert gap(found, expected) <= case.tolerance, backend.name


def random(*shape, dtype=torch.bfloat16, spread=1.0):
    """Normal numbers on the device."""
    generator = torch.Generator(GPU).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=GPU) * spread).to(dtype)


def norm_arguments(rows, width, dtype):
    return random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)  # fmt: skip


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@every_dtype
@pytest.mark.parametrize("rows", [1, 257, 16384])
@pytest.mark.parametrize("width", [1024, 2048, 4096])
def test_norms_of_real_widths_agree_with_the_reference(rows, width, dtype):
    x, stream, weight = norm_arguments(rows, width, dtype)

    for name, arguments in (
        ("rms_norm", lambda: (x, weight, 1e-6)),
        ("add_rms_norm", lambda: (x, stream.clone(), weight, 1e-6)),
        ("add_residual", lambda: (x, stream.clone())),
    ):
        theirs = arguments()
        expected = OPS[name].reference(*theirs)
        for backend in fitting(name):
            ours = arguments()
            found = backend.call(*ours)
            assert gap((found, *ours[:2]), (expected, *theirs[:2])) <= tolerance_of(dtype), name


@every_dtype
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (300, 768), (16384, 3072)])
def test_activations_of_real_widths_agree_with_the_reference(rows, width, dtype):
    gate_up = random(rows, 2 * width, dtype=dtype, spread=4.0)

    for backend in fitting("silu_mul"):
        found = backend.call(gate_up)
        assert gap((found,), (OPS["silu_mul"].reference(gate_up),)) <= tolerance_of(dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "norms"), [(16, 8, True), (32, 8, False), (32, 4, True)]
)
@pytest.mark.parametrize("tokens", [1, 255, 8192])
def test_rotations_of_real_heads_agree_with_the_reference(heads, kv_heads, norms, tokens):
    head_dim, block_tokens, blocks, places = 128, 16, 1024, 40960
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(0, places, (tokens,), device=GPU).int()
    angles = torch.rand((places, head_dim // 2), device=GPU) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = torch.randperm(blocks * block_tokens, device=GPU)[:tokens]
    slots[3::5] = -1
    weights = [random(head_dim) if norms else None for _ in range(2)]

    def run(call):
        caches = qkv.new_zeros((blocks, 2, kv_heads, block_tokens, head_dim))
        q = call(qkv, positions, cos_sin, caches[:, 0], caches[:, 1], slots, *weights, 1e-6)
        return q, caches

    expected = run(OPS["rotate_and_cache"].reference)
    for backend in fitting("rotate_and_cache"):
        assert gap(run(backend.call), expected) <= tolerance_of(torch.bfloat16)


@every_dtype
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_maxima_of_a_real_vocabulary_are_exact(rows, dtype):
    logits = random(rows, 151936, dtype=dtype, spread=5.0)
    logits[0, [150000, 77]] = 90.0
    logits[-1, [140000, 140001]] = float("nan")

    expected = OPS["argmax_rows"].reference(logits.cpu())
    for backend in fitting("argmax_rows"):
        assert gap(backend.call(logits), expected) == 0.0


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_of_a_real_vocabulary_agree_with_the_reference(rows):
    scores = random(rows, 151936, dtype=torch.float32, spread=5.0)
    inverses = torch.rand(rows, device=GPU) + 0.5
    arguments = scores, scores.amax(dim=1), inverses

    for backend in fitting("token_weights"):
        gaps = gap(backend.call(*arguments), OPS["token_weights"].reference(*arguments))
        assert gaps <= tolerance_of(torch.float32)


def test_rows_of_embeddings_far_into_a_table_are_copied():
    table = random(600_000, 4096)
    token_ids = torch.tensor([0, 599_999, 524_289, 524_287], device=GPU, dtype=torch.int32)

    for backend in fitting("embed"):
        assert torch.equal(backend.call(token_ids, table), table[token_ids.long()])


def test_random_steps_are_filled_as_on_the_cpu():
    cases = random_step_cases(RANDOM_STEPS)

    for backend in fitting("fill_step"):
        for case in cases:
            expected = case.outcome(OPS["fill_step"].reference)
            assert gap(outcome_on(case, backend.call, GPU), expected) == 0.0, (backend.name, case)
