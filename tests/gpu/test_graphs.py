"""Do CUDA graphs replay segments and regions as the eager forward runs them?"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.graph_models import (
    WIDTH,
    DenseToy,
    ExpertToy,
    SparseToy,
    a_rig,
    eager,
    prompts,
    record_tokens,
    toy_select,
)
from tokamak.errors import HostReadInRecording
from tokamak.graphs.cuda import CudaBackend, capture_stream
from tokamak.graphs.region import Manifest, eager_region
from tokamak.graphs.request_graph import RequestKey

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
GPU = torch.device("cuda", 0)
every_toy = pytest.mark.parametrize("kind", [DenseToy, ExpertToy, SparseToy])
ADDRESSES: list[tuple[int, int]] = []


@eager_region("toy_addresses")
def toy_addresses(x: torch.Tensor, out: torch.Tensor) -> None:
    """Notes where its tensors lie."""
    ADDRESSES.append((x.data_ptr(), out.data_ptr()))
    out.copy_(x)


def a_gpu_rig(kind=DenseToy, **options):
    return a_rig(kind, backend=lambda: CudaBackend(GPU), device=GPU, **options)


@every_toy
def test_segments_and_regions_replay_as_they_run_eagerly_in_any_order(kind):
    with torch.inference_mode():
        rig = a_gpu_rig(kind)
        for bucket in (16, 8, 4):
            record_tokens(rig, bucket)
        order = random.Random(5)

        for seed in range(30):
            bucket = order.choice((4, 8, 16))
            rows = order.randint(bucket // 2 + 1, bucket)
            ctx = rig.arena.prefill(prompts(rows, seed=seed), running_tokens=bucket)
            expected = eager(rig.model.forward, ctx)
            rig.tokens.poison()
            found = rig.tokens.replay(bucket, ctx)
            rig.tokens.poison()

            torch.testing.assert_close(found, expected, msg=f"bucket {bucket}, {rows} rows")


def test_recording_returns_the_result_of_the_step_it_recorded():
    rig = a_gpu_rig()
    ctx = rig.arena.prefill(prompts(3, 5), running_tokens=8)

    outlet = rig.tokens.record(8, rig.model.forward, ctx)

    torch.testing.assert_close(outlet, eager(rig.model.forward, ctx))


def test_decode_steps_replay_as_one_launch():
    with torch.inference_mode():
        rig = a_gpu_rig()
        key = RequestKey(8, 1)
        rig.requests.record(key, rig.model.forward, rig.arena.decode([1] * 8, [16] * 8, running=8))
        ctx = rig.arena.decode([3, 4, 5], [2, 9, 16], running=8)
        expected = eager(rig.model.forward, ctx)

        found = rig.requests.replay(key, ctx)

        torch.testing.assert_close(found[:3], expected[:3])
        assert rig.requests.report().segments == 1
        assert rig.requests.report().native


def test_a_replay_waits_for_nothing():
    rig = a_gpu_rig()
    key = RequestKey(4, 1)
    ctx = rig.arena.decode([1] * 4, [3] * 4, running=4)
    rig.requests.record(key, rig.model.forward, ctx)

    with no_host_wait():
        rig.requests.replay(key, ctx)

    torch.testing.assert_close(rig.requests.replay(key, ctx), eager(rig.model.forward, ctx))


def test_a_side_stream_joined_in_its_segment_is_recorded_with_it():
    rig = a_gpu_rig(manifest=Manifest.of("toy_select"))

    def forward(step):
        x = rig.model.embed(step)
        with rig.arena.streams.fork("side"):
            y = x @ rig.model.outer[0]
        z = x @ rig.model.outer[1]
        rig.arena.streams.join("side")
        picked = torch.empty_like(x)
        toy_select(y + z, picked, 1)
        return picked + y

    record_tokens(rig, 8, forward)
    ctx = rig.arena.prefill(prompts(6, seed=1), running_tokens=8)
    rig.tokens.poison()

    torch.testing.assert_close(rig.tokens.replay(8, ctx), eager(forward, ctx))


def test_a_wait_for_the_device_in_a_segment_is_a_host_read_and_leaves_the_back_end_usable():
    rig = a_gpu_rig(manifest=Manifest.of())

    def reading(step):
        x = rig.model.embed(step)
        return x + x.sum().item()

    with pytest.raises(HostReadInRecording, match="waited for cuda:0"):
        record_tokens(rig, 8, reading)

    assert torch.cuda.current_stream(GPU) == torch.cuda.default_stream(GPU)
    record_tokens(rig, 8, rig.model.embed)
    ctx = rig.arena.prefill(prompts(6, seed=1), running_tokens=8)
    torch.testing.assert_close(rig.tokens.replay(8, ctx), eager(rig.model.embed, ctx))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_region_gets_the_same_addresses_in_all_replays(compiled):
    rig = a_gpu_rig(manifest=Manifest.of(("toy_addresses", 2)))

    def forward(step):
        x = rig.model.embed(step)
        for _ in range(2):
            out = torch.empty_like(x)
            toy_addresses(x * 2, out)
            x = out + 1
        return x

    run = torch.compile(forward, backend="aot_eager", dynamic=False) if compiled else forward
    with torch.inference_mode():
        record_tokens(rig, 8, run)
        recorded = ADDRESSES[-2:]
        ADDRESSES.clear()
        for seed in range(3):
            ctx = rig.arena.prefill(prompts(7, seed=seed), running_tokens=8)
            found = rig.tokens.replay(8, ctx).clone()

            assert recorded == ADDRESSES
            ADDRESSES.clear()
            torch.testing.assert_close(found, eager(forward, ctx))
            ADDRESSES.clear()


def test_buckets_share_one_pool_on_one_capture_stream():
    rig = a_gpu_rig(ExpertToy, buckets=(32, 48, 64))
    record_tokens(rig, 64)
    alone = rig.tokens.pool_bytes()

    for bucket in (48, 32):
        record_tokens(rig, bucket)

    assert alone > 0
    assert rig.tokens.pool_bytes() == alone
    assert capture_stream(GPU) is capture_stream(torch.device("cuda", 0))


def test_pool_tensors_are_detached_and_others_are_themselves():
    backend = CudaBackend(GPU)
    outside = torch.ones(4, device=GPU)
    backend.begin_segment()
    inside = torch.empty(6, WIDTH, dtype=torch.bfloat16, device=GPU)
    inside.fill_(2)
    backend.end_segment()

    alias = backend.detached(inside[1::2, 1:3])

    assert backend.detached(outside) is outside
    assert alias.data_ptr() == inside[1:, 1:].data_ptr()
    assert alias.untyped_storage()._cdata != inside.untyped_storage()._cdata
    assert torch.equal(alias.float().cpu(), torch.full((3, 2), 2.0))


def test_an_empty_segment_is_not_launched():
    backend = CudaBackend(GPU)
    backend.begin_segment()

    segment = backend.end_segment()

    assert segment.empty
    assert segment.kernel_runs == 0
    backend.replay(segment)
