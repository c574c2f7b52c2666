"""Does a replay give, bit for bit, what the eager forward gives at the same size?"""

from __future__ import annotations

import pytest
import torch

from tests.support.graph_models import (
    NOTES,
    WIDTH,
    DenseToy,
    ExpertToy,
    SparseToy,
    a_rig,
    eager,
    prompts,
    record_tokens,
    toy_live_note,
)
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest
from tokamak.graphs.region_graph import RegionCall
from tokamak.graphs.request_graph import RequestKey
from tokamak.graphs.token_graph import DecoderGraph

every_toy = pytest.mark.parametrize("kind", [DenseToy, ExpertToy, SparseToy])
every_mode = pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])

STEPS = [(3,), (4,), (2, 3), (5, 2), (8,), (3, 3, 3), (15,), (7, 9)]
"""Prompt lengths of steps: each bucket of 4, 8 and 16, a row less, and a row more than the one below."""


@every_mode
@every_toy
def test_token_steps_of_every_size_replay_as_they_run_eagerly(kind, inference):
    with torch.inference_mode(inference):
        rig = a_rig(kind)
        for bucket in (16, 8, 4):
            record_tokens(rig, bucket)

        for seed, lengths in enumerate(STEPS):
            bucket = rig.tokens.bucket(sum(lengths))
            ctx = rig.arena.prefill(prompts(*lengths, seed=seed), running_tokens=bucket)
            expected = eager(rig.model.forward, ctx)
            found = rig.tokens.replay(bucket, ctx)

            assert found.shape == (bucket, WIDTH)
            assert torch.equal(found, expected), lengths


@every_mode
def test_decode_steps_of_every_size_replay_as_they_run_eagerly(inference):
    with torch.inference_mode(inference):
        rig = a_rig(DenseToy)
        for cache in (*rig.model.keys, *rig.model.values):
            cache.copy_(torch.randn(cache.shape))
        for size in (16, 8, 4):
            ctx = rig.arena.decode([1] * size, [16] * size, running=size)
            rig.requests.record(RequestKey(size, 1), rig.model.forward, ctx)

        for requests in (1, 3, 4, 5, 7, 8, 9, 16):
            size = rig.requests.bucket(requests, q_width=1)
            lengths = [1 + (5 * row + requests) % 16 for row in range(requests)]
            ctx = rig.arena.decode(list(range(requests)), lengths, running=size)
            expected = eager(rig.model.forward, ctx)

            assert torch.equal(rig.requests.replay(RequestKey(size, 1), ctx), expected), requests


def test_recording_returns_the_result_of_the_step_it_recorded():
    rig = a_rig()
    ctx = rig.arena.prefill(prompts(3, 5), running_tokens=8)

    outlet = rig.tokens.record(8, rig.model.forward, ctx)

    assert torch.equal(outlet, eager(rig.model.forward, ctx))


def test_padding_changes_no_scheduled_row():
    rig = a_rig()
    record_tokens(rig, 16)
    step = prompts(4, 5)

    alone = eager(rig.model.forward, rig.arena.prefill(step, running_tokens=9))
    padded = rig.tokens.replay(16, rig.arena.prefill(step, running_tokens=16))

    torch.testing.assert_close(padded[:9], alone)


@every_toy
def test_b_breaks_make_b_plus_one_segments(kind):
    rig = a_rig(kind)

    record_tokens(rig, 8)

    entries = rig.tokens._recordings[8].entries
    calls = [isinstance(entry, RegionCall) for entry in entries]
    breaks = len(kind.regions.names)
    assert calls == [False, True] * breaks + [False]
    assert rig.tokens.report().segments == breaks + 1


def test_a_request_graph_is_one_segment():
    rig = a_rig()
    ctx = rig.arena.decode([1] * 4, [3] * 4, running=4)

    rig.requests.record(RequestKey(4, 1), rig.model.forward, ctx)

    assert rig.requests.report().segments == 1


def noted(model):
    def forward(step):
        x = model.embed(step)
        out = torch.empty_like(x)
        toy_live_note(x * 2, out)
        return out + 1

    return forward


def test_an_always_eager_region_breaks_a_request_graph_and_runs_in_every_replay():
    rig = a_rig(manifest=Manifest.of("toy_live_note"))
    forward = noted(rig.model)
    ctx = rig.arena.decode([1] * 4, [3] * 4, running=4)
    rig.requests.record(RequestKey(4, 1), forward, ctx)
    NOTES.clear()

    step = rig.arena.decode([5, 6, 7], [1, 2, 3], running=4)
    found = rig.requests.replay(RequestKey(4, 1), step)

    assert NOTES == [3]
    assert rig.requests.report().segments == 2
    assert torch.equal(found, eager(forward, step))


def test_buckets_that_were_not_recorded_are_not_offered():
    rig = a_rig(buckets=(4, 8, 16))
    record_tokens(rig, 16)
    record_tokens(rig, 4)

    offered = [rig.tokens.bucket(tokens) for tokens in (3, 5, 9, 17)]

    assert offered == [4, None, 16, None]
    assert 8 not in rig.tokens
    assert rig.tokens.buckets() == (16, 4)


def test_request_buckets_differ_by_width_and_split():
    rig = a_rig()
    ctx = rig.arena.decode([1] * 4, [3] * 4, running=4)
    rig.requests.record(RequestKey(4, 1), rig.model.forward, ctx)

    assert rig.requests.bucket(3, q_width=1) == 4
    assert rig.requests.bucket(3, q_width=2) is None
    assert rig.requests.bucket(3, q_width=1, split=True) is None


def test_a_report_says_what_is_recorded():
    rig = a_rig(ExpertToy)
    nothing = rig.tokens.report()
    for bucket in (16, 4):
        record_tokens(rig, bucket)

    report = rig.tokens.report()

    assert (nothing.buckets, nothing.segments, nothing.pool_bytes, nothing.native) == (
        (),
        0,
        0,
        False,
    )
    assert (report.kind, report.name, report.buckets) == ("token", "toy tokens", (16, 4))
    assert report.segments == 2 * 7
    assert report.pool_bytes == rig.tokens.pool_bytes() > 0
    assert report.seconds > 0


def test_a_forgotten_bucket_is_not_offered():
    rig = a_rig()
    record_tokens(rig, 8)

    rig.tokens.forget(8)

    assert rig.tokens.bucket(7) is None


def test_late_layers_run_from_a_graph_of_their_own_after_the_early_ones():
    rig = a_rig(ExpertToy)
    early, model = record_tokens(rig, 16), rig.model
    tail = torch.zeros(4, WIDTH)
    tail_at = torch.zeros(4, dtype=torch.int64)

    def late(step):
        picked = tail.copy_(early[tail_at])
        return torch.nn.functional.silu(picked @ model.outer[0]) + picked

    decoder = DecoderGraph(
        "toy tail",
        Ladder((4,)),
        rig.tokens._backend_factory,
        Manifest.of(),
        rig.arena.streams,
        rig.buffers,
    )
    decoder.open_outlets(torch.empty(1, WIDTH), 4)
    decoder.record(4, late, rig.arena.prefill(prompts(16), running_tokens=16))
    ctx = rig.arena.prefill(prompts(5, 6, seed=3), running_tokens=16)
    tail_at.copy_(torch.tensor([3, 4, 9, 10]))

    rig.tokens.replay(16, ctx)
    found = decoder.replay(4, ctx)

    x = eager(model.forward, ctx)[[3, 4, 9, 10]]
    assert torch.equal(found, torch.nn.functional.silu(x @ model.outer[0]) + x)
    assert decoder.report().kind == "decoder"
