"""Which recordings and replays are refused, by what name, and what is usable afterwards?"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.graph_models import (
    CPU,
    WIDTH,
    a_rig,
    eager,
    prompts,
    record_tokens,
    toy_live_note,
    toy_select,
)
from tokamak.core.context import current
from tokamak.errors import (
    BucketNotRecorded,
    ContextNested,
    GraphError,
    HandoffShape,
    HostReadInRecording,
    LateBuffer,
    NestedRecording,
    PoisonedGraph,
    RegionMismatch,
    UnjoinedSideStream,
)
from tokamak.graphs.backend import make_backend
from tokamak.graphs.region import Manifest, eager_region
from tokamak.graphs.request_graph import RequestKey


def in_forward(rig, act):
    """A forward of one recorded segment that does something on the way."""

    def forward(step):
        x = rig.model.embed(step)
        return x + act(x)

    return forward


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: 1.0 if (x.sum() > 0) else 0.0,
    "int": lambda x: int(x.argmax()),
    "nonzero": lambda x: torch.nonzero(x > 0).sum(),
    "mask": lambda x: x[x > 0].sum(),
    "unique": lambda x: x.unique().sum(),
    "equal": lambda x: float(torch.equal(x, x)),
    "where": lambda x: torch.where(x > 0)[0].sum(),
    "repeat": lambda x: torch.ones(x.shape[0]).repeat_interleave(x[:, 0].int().abs()).sum(),
}


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_segment_that_reads_numbers_back_is_refused_by_the_ops_name(read, inference):
    rig = a_rig(manifest=Manifest.of())

    with (
        torch.inference_mode(inference),
        pytest.raises(HostReadInRecording, match=r"aten::.* was called in a recorded segment"),
    ):
        record_tokens(rig, 8, in_forward(rig, read))


FIXED = {
    "index": lambda x: x[x[:, 0].long().abs() % 4],
    "repeat": lambda x: x.repeat_interleave(torch.tensor([1] * 8), dim=0, output_size=8),
    "topk": lambda x: x.topk(2).values.sum(-1, keepdim=True),
    "in place": lambda x: x.clone().mul_(3).add_(x)[:, :1],
    "out": lambda x: torch.add(x, 1, out=torch.empty(8, WIDTH)),
    "split": lambda x: torch.cat(x.split(4)[::-1]),
    "constant": lambda x: x * torch.tensor([2.0]),
    "empty": lambda x: torch.cat([x, x[:0]]),
}


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])
@pytest.mark.parametrize("act", FIXED.values(), ids=FIXED)
def test_ops_of_fixed_shapes_are_recorded_whatever_they_return(act, inference):
    rig = a_rig(manifest=Manifest.of())
    with torch.inference_mode(inference):
        record_tokens(rig, 8, in_forward(rig, act))
        ctx = rig.arena.prefill(prompts(8, seed=2), running_tokens=8)

        rig.tokens.poison()
        found = rig.tokens.replay(8, ctx).clone()

        assert torch.equal(found, eager(in_forward(rig, act), ctx))


def test_a_bucket_nobody_recorded_is_named():
    rig = a_rig()
    record_tokens(rig, 8)
    ctx = rig.arena.prefill(prompts(3), running_tokens=4)

    with pytest.raises(BucketNotRecorded, match=r"no bucket 4.*recorded are 8"):
        rig.tokens.replay(4, ctx)


@pytest.mark.parametrize("use", ["record", "replay"])
def test_graphs_are_not_used_inside_a_recording(use):
    rig = a_rig(manifest=Manifest.of())
    ctx = rig.arena.decode([1] * 4, [1] * 4, running=4)
    key = RequestKey(4, 1)
    rig.requests.record(key, rig.model.embed, ctx)

    def inner(x):
        if use == "record":
            rig.requests.record(RequestKey(8, 1), rig.model.embed, ctx)
        else:
            rig.requests.replay(key, ctx)
        return x

    with pytest.raises(NestedRecording, match="bucket 8 of 'toy tokens'"):
        record_tokens(rig, 8, in_forward(rig, inner))

    assert torch.equal(rig.requests.replay(key, ctx), eager(rig.model.embed, ctx))


FAILS = {"fails": False}


@eager_region("toy_failing")
def toy_failing(x: torch.Tensor, out: torch.Tensor) -> None:
    """Fails when told to."""
    if FAILS["fails"]:
        raise RuntimeError("the region failed")
    out.copy_(x)


class OnPurposeError(Exception):
    """A forward's own mistake."""


def failing(rig):
    def forward(step):
        x = rig.model.embed(step)
        out = torch.empty_like(x)
        toy_failing(x, out)
        return out

    return forward


@pytest.fixture
def failure():
    FAILS["fails"] = False
    yield FAILS
    FAILS["fails"] = False


def test_a_graph_that_failed_in_a_replay_is_never_used_again(failure):
    rig = a_rig(manifest=Manifest.of("toy_failing"))
    record_tokens(rig, 8, failing(rig))
    ctx = rig.arena.prefill(prompts(8), running_tokens=8)
    failure["fails"] = True
    with pytest.raises(PoisonedGraph, match="failed in a replay: RuntimeError: the region failed"):
        rig.tokens.replay(8, ctx)
    failure["fails"] = False

    with pytest.raises(PoisonedGraph, match="failed in a replay: RuntimeError: the region failed"):
        rig.tokens.replay(8, ctx)
    with pytest.raises(PoisonedGraph):
        rig.tokens.record(8, failing(rig), ctx)


def test_a_context_that_is_in_use_is_refused_without_harm_to_the_graph():
    rig = a_rig(manifest=Manifest.of())
    record_tokens(rig, 8, rig.model.embed)
    ctx = rig.arena.prefill(prompts(8), running_tokens=8)

    with pytest.raises(ContextNested):
        eager(lambda step: rig.tokens.replay(8, ctx), ctx)

    assert torch.equal(rig.tokens.replay(8, ctx), eager(rig.model.embed, ctx))


@pytest.mark.parametrize("where", ["segment", "region"])
def test_a_recording_that_failed_leaves_its_back_end_usable(failure, where):
    rig = a_rig(manifest=Manifest.of("toy_failing"))
    record_tokens(rig, 16, failing(rig))

    def forward(step):
        hidden = failing(rig)(step)
        if rig.tokens._backends[None].capturing():
            if where == "segment":
                raise OnPurposeError
            failure["fails"] = True
            failing(rig)(step)
        return hidden

    with pytest.raises((OnPurposeError, RuntimeError)):
        record_tokens(rig, 8, forward)
    failure["fails"] = False

    assert 8 not in rig.tokens
    assert not rig.tokens._backends[None].capturing()
    record_tokens(rig, 8, failing(rig))
    for bucket in (8, 16):
        ctx = rig.arena.prefill(prompts(bucket - 1, seed=3), running_tokens=bucket)
        rig.tokens.poison()
        assert torch.equal(rig.tokens.replay(bucket, ctx), eager(failing(rig), ctx))


def test_a_persistent_buffer_asked_for_in_a_recording_is_refused_by_name():
    rig = a_rig(manifest=Manifest.of())
    made = []

    def lazily(x):
        if rig.tokens._backends[None].capturing():
            made.append(rig.buffers.make("lazy", (4,), torch.float32, CPU))
        return x

    with pytest.raises(LateBuffer, match="'lazy'"):
        record_tokens(rig, 8, in_forward(rig, lazily))

    assert not made
    assert rig.buffers.make("lazy", (4,), torch.float32, CPU).shape == (4,)


def test_an_outlet_is_opened_before_recording_and_large_enough():
    rig = a_rig(buckets=(4, 8))
    graph = rig.tokens

    with pytest.raises(LateBuffer, match="outlet of 16 rows and has one of 8"):
        record_tokens(rig, 16)

    graph._outlet = None
    with pytest.raises(LateBuffer, match="has none"):
        record_tokens(rig, 8)


def test_a_result_unlike_the_outlet_is_refused():
    rig = a_rig(manifest=Manifest.of())

    with pytest.raises(
        HandoffShape, match=r"gave \[8, 15\] of torch.float32; its outlet is \[16, 16\]"
    ):
        record_tokens(rig, 8, lambda step: rig.model.embed(step)[:, 1:])


@eager_region("toy_resizing")
def toy_resizing(x: torch.Tensor, out: torch.Tensor, how: str) -> None:
    """Hands back other memory than it was given."""
    if how == "resize":
        out.resize_(1, WIDTH)
    elif how == "rebind":
        out.set_(x.clone())
    elif how == "data":
        out.data = x.clone()


@pytest.mark.parametrize("how", ["resize", "rebind", "data"])
def test_a_region_that_resizes_or_rebinds_its_out_is_refused(how):
    rig = a_rig(manifest=Manifest.of("toy_resizing"))

    def forward(step):
        x = rig.model.embed(step)
        out = torch.empty_like(x)
        toy_resizing(x, out, how if rig.tokens._backends else "no")
        return out if out.shape == x.shape else x

    with pytest.raises(HandoffShape, match="'toy_resizing' handed back 'out'"):
        record_tokens(rig, 8, forward)


def forking(rig, *, join_in):
    streams = rig.arena.streams

    def forward(step):
        x = rig.model.embed(step)
        with streams.fork("prefetch"):
            y = x * 2
        if join_in == 0:
            streams.join("prefetch")
        picked = torch.empty_like(x)
        toy_select(x, picked, 1)
        if join_in == 1:
            streams.join("prefetch")
        return picked + y

    return forward


def test_a_fork_that_is_open_across_a_break_is_named_with_its_segment():
    rig = a_rig(manifest=Manifest.of("toy_select"))

    with pytest.raises(
        UnjoinedSideStream, match="'prefetch', opened in segment 0, is open where segment 0"
    ):
        record_tokens(rig, 8, forking(rig, join_in=1))

    record_tokens(rig, 8, forking(rig, join_in=0))
    ctx = rig.arena.prefill(prompts(6, seed=1), running_tokens=8)
    assert torch.equal(rig.tokens.replay(8, ctx), eager(forking(rig, join_in=0), ctx))


def test_a_fork_that_is_never_joined_is_named():
    rig = a_rig(manifest=Manifest.of("toy_select"))

    with pytest.raises(UnjoinedSideStream, match=r"'prefetch'.* is open where the forward ends"):
        record_tokens(rig, 8, forking(rig, join_in=None))


@eager_region("toy_prefetch")
def toy_prefetch(x: torch.Tensor, out: torch.Tensor) -> None:
    """Starts work that a later region waits for."""
    with current().streams.fork("rows"):
        out.copy_(x * 3)


@eager_region("toy_arrive", outs=())
def toy_arrive(x: torch.Tensor, join: bool) -> None:
    """Waits for the rows."""
    if join:
        current().streams.join("rows")


@pytest.mark.parametrize("joins", [True, False])
def test_a_fork_of_one_region_may_be_joined_in_a_later_one_and_must_be(joins):
    rig = a_rig(manifest=Manifest.of("toy_prefetch", "toy_select", "toy_arrive"))

    def forward(step):
        x = rig.model.embed(step)
        rows, picked = torch.empty_like(x), torch.empty_like(x)
        toy_prefetch(x, rows)
        toy_select(x, picked, 1)
        toy_arrive(rows, joins or not rig.tokens._backends[None].capturing())
        return rows + picked

    if joins:
        record_tokens(rig, 8, forward)
        ctx = rig.arena.prefill(prompts(6, seed=1), running_tokens=8)
        assert torch.equal(rig.tokens.replay(8, ctx), eager(forward, ctx))
    else:
        with pytest.raises(
            UnjoinedSideStream, match="opened in region 'toy_prefetch', is open where"
        ):
            record_tokens(rig, 8, forward)


def test_a_recorded_region_cannot_hold_one_that_is_always_eager():
    rig = a_rig(manifest=Manifest.of("toy_outer"))
    ctx = rig.arena.decode([1] * 4, [1] * 4, running=4)

    def forward(step):
        x = rig.model.embed(step)
        out = torch.empty_like(x)
        toy_outer(x, out)
        return out

    with pytest.raises(
        RegionMismatch, match=r"'toy_live_note' is always eager .* region 'toy_outer'"
    ):
        rig.requests.record(RequestKey(4, 1), forward, ctx)

    record_tokens(rig, 8, forward)
    step = rig.arena.prefill(prompts(5, seed=1), running_tokens=8)
    assert torch.equal(rig.tokens.replay(8, step), eager(forward, step))


@eager_region("toy_outer")
def toy_outer(x: torch.Tensor, out: torch.Tensor) -> None:
    """Calls another region."""
    toy_live_note(x, out)


def test_garbage_is_collected_before_a_capture_and_not_in_it():
    rig = a_rig(manifest=Manifest.of())
    seen = []

    def watching(x):
        seen.append(gc.isenabled())
        if len(seen) == 4:
            raise ValueError
        return x

    record_tokens(rig, 8, in_forward(rig, watching))
    on_after = gc.isenabled()
    with pytest.raises(ValueError):  # noqa: PT011
        record_tokens(rig, 8, in_forward(rig, watching))

    assert seen == [True, False, True, False]
    assert on_after
    assert gc.isenabled()


def test_hooks_surround_the_capture_and_precede_the_replay():
    rig = a_rig(manifest=Manifest.of())
    heard = []
    graph = rig.tokens
    graph.before_capture.append(lambda key: heard.append(("before capture", key)))
    graph.after_capture.append(lambda key: heard.append(("after capture", key)))
    graph.before_replay.append(lambda key: heard.append(("before replay", key)))

    def noting(x):
        heard.append("forward")
        return x

    record_tokens(rig, 8, in_forward(rig, noting))
    graph.replay(8, rig.arena.prefill(prompts(8), running_tokens=8))

    assert heard == [
        "forward", ("before capture", 8), "forward", ("after capture", 8), ("before replay", 8),
    ]  # fmt: skip


def test_the_sim_back_end_records_on_a_cpu_and_the_cuda_back_end_on_a_gpu():
    with pytest.raises(GraphError, match="on a CPU, not on meta"):
        make_backend("sim", torch.device("meta"))
    with pytest.raises(GraphError, match="on a GPU, not on cpu"):
        make_backend("cuda", CPU)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
def test_a_weight_without_a_storage_of_its_own_is_recorded_by_reference():
    rig = a_rig(manifest=Manifest.of())
    packed = torch.ops.mkldnn._reorder_linear_weight(rig.model.outer[0].T.contiguous(), 1)

    def forward(step):
        x = rig.model.embed(step)
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    record_tokens(rig, 8, forward)
    ctx = rig.arena.prefill(prompts(8, seed=2), running_tokens=8)
    rig.tokens.poison()

    assert torch.equal(rig.tokens.replay(8, ctx), eager(forward, ctx))
