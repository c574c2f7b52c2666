"""Is each way in which recordings go wrong found? The fault is put in here, and must show."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.graph_models import (
    CPU,
    SMALL_CHUNK_BYTES,
    WIDTH,
    DenseToy,
    ExpertToy,
    SparseToy,
    ToyModel,
    a_rig,
    eager,
    prompts,
    record_tokens,
    toy_attention,
    toy_select,
)
from tokamak.core.context import current
from tokamak.errors import RegionMismatch
from tokamak.graphs import region_graph
from tokamak.graphs.region import RECORDING, Manifest, begin_forward, eager_region
from tokamak.graphs.sim import SimBackend
from tokamak.graphs.token_graph import TokenGraph

every_toy = pytest.mark.parametrize("kind", [DenseToy, ExpertToy, SparseToy])


class FrozenToy(ToyModel):
    """Hands a number of the step to a region as an argument."""

    regions = Manifest.of("toy_select")

    def forward(self, step):
        x = self.embed(step)
        picked = torch.empty_like(x)
        toy_select(x, picked, current().shape.scheduled_tokens)
        return picked


def test_a_number_that_varies_between_steps_shows_when_it_is_frozen_in_a_region_argument():
    rig = a_rig(FrozenToy)
    record_tokens(rig, 8)

    full = rig.arena.prefill(prompts(8, seed=1), running_tokens=8)
    same = torch.equal(rig.tokens.replay(8, full), eager(rig.model.forward, full))
    short = rig.arena.prefill(prompts(5, seed=1), running_tokens=8)
    frozen = torch.equal(rig.tokens.replay(8, short), eager(rig.model.forward, short))

    assert same
    assert not frozen


class DroppedOnce:
    """A start of the forward that drops tables before the warm-up and forgets to before the capture."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ctx):
        self.calls += 1
        if self.calls != 2:
            begin_forward(ctx)


@pytest.mark.parametrize(("start", "stale"), [(begin_forward, False), (DroppedOnce(), True)])
def test_tables_filled_in_the_warm_up_are_stale_unless_they_are_dropped(monkeypatch, start, stale):
    rig = a_rig(SparseToy)
    monkeypatch.setattr(region_graph, "begin_forward", start)
    record_tokens(rig, 16)
    ctx = rig.arena.prefill(prompts(2, 3, seed=1), running_tokens=16)

    found = rig.tokens.replay(16, ctx).clone()

    assert torch.equal(found, eager(rig.model.forward, ctx)) is not stale


@eager_region("toy_blocks", outs=("out",))
def toy_blocks(out: torch.Tensor) -> None:
    """Blocks in use, by a derived table that is read live."""
    out.fill_(current().inputs.rows["keys"].indptrs()[-1].item())


def counting_blocks(step):
    out = torch.empty(step.token_ids.shape[0], WIDTH)
    toy_blocks(out)
    return out + 0


@pytest.mark.parametrize("drops", [True, False])
def test_tables_of_an_earlier_run_are_stale_in_a_replay_unless_it_drops_them(monkeypatch, drops):
    rig = a_rig(manifest=Manifest.of("toy_blocks"))
    record_tokens(rig, 16, counting_blocks)
    if not drops:
        monkeypatch.setattr(region_graph, "begin_forward", lambda ctx: None)
    ctx = rig.arena.prefill(prompts(16), running_tokens=16)
    before = rig.tokens.replay(16, ctx)[0, 0].item()

    # The same buffers and the same views of them, refilled for another step.
    rig.arena.prefill(prompts(4, 4), running_tokens=16)
    after = rig.tokens.replay(16, ctx)[0, 0].item()

    assert before == 4
    assert after == (2 if drops else 4)


@every_toy
def test_buckets_share_a_pool_in_any_order_of_replays(kind):
    rig = a_rig(kind)
    for bucket in (16, 8, 4):
        record_tokens(rig, bucket)
    order = random.Random(5)

    for seed in range(40):
        bucket = order.choice((4, 8, 16))
        rows = order.randint(bucket // 2 + 1, bucket)
        ctx = rig.arena.prefill(prompts(rows, seed=seed), running_tokens=bucket)
        expected = eager(rig.model.forward, ctx)
        rig.tokens.poison()
        found = rig.tokens.replay(bucket, ctx)
        rig.tokens.poison()

        assert torch.equal(found, expected), (bucket, rows)


class LeakyGraph(TokenGraph):
    """Hands out what lies in the pool, instead of a copy."""

    def _hand_out(self, result):
        return self._backends[None].detached(result)


def test_a_result_that_stays_in_the_pool_is_found_by_poisoning():
    rig = a_rig()
    leaky = LeakyGraph(
        "leaky",
        rig.tokens.ladder,
        rig.tokens._backend_factory,
        rig.model.regions,
        rig.arena.streams,
        rig.buffers,
    )
    ctx = rig.arena.prefill(prompts(8), running_tokens=8)
    leaky.record(8, rig.model.forward, ctx)

    found = leaky.replay(8, ctx)
    before = torch.equal(found, eager(rig.model.forward, ctx))
    leaky.poison()

    assert before
    assert found.isnan().all()


class CrossingToy(DenseToy):
    """Keeps a tensor of the larger bucket's recording, and reads it in the smaller one's."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = None

    def forward(self, step):
        x = super().forward(step)
        if step.token_ids.shape[0] == 16:
            self.kept = x
            return x
        return x + self.kept[: x.shape[0]]


def test_a_tensor_that_crosses_from_one_recording_to_another_is_found_by_poisoning():
    rig = a_rig(CrossingToy)
    record_tokens(rig, 16)
    record_tokens(rig, 8)
    rig.model.kept = rig.tokens._backends[None].detached(rig.model.kept)
    ctx = rig.arena.prefill(prompts(8), running_tokens=8)

    rig.tokens.poison()
    found = rig.tokens.replay(8, ctx)

    assert found.isnan().any()


class WithoutOp(DenseToy):
    """Calls a region's body, as if it were not registered."""

    def attend(self, x, layer):
        if layer != 1:
            return super().attend(x, layer)
        q, k, v = (x @ self.inner[layer]).chunk(3, dim=-1)
        out = torch.empty_like(x)
        toy_attention.body(q, k, v, out, layer)
        return x + out @ self.outer[layer]


def without_host_reads(q, k, v, out, layer):
    """A body that a segment can hold, so that only the manifest objects."""
    out.copy_(q + v)


def test_a_region_that_is_no_longer_an_op_is_missed_by_name(monkeypatch):
    rig = a_rig(WithoutOp)
    monkeypatch.setattr(toy_attention, "body", without_host_reads)

    with pytest.raises(
        RegionMismatch, match=r"toy tokens.*region 2 .*'toy_attention' and is the end"
    ):
        record_tokens(rig, 8)

    assert 8 not in rig.tokens


def traced(forward):
    """A forward whose layers are compiled as one graph, op by op, and never looked at again."""
    torch._dynamo.reset()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(forward, backend="eager", fullgraph=True, dynamic=False, options=options)


@pytest.fixture
def _fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@every_toy
def test_a_compiled_forward_meets_every_region(kind):
    rig = a_rig(kind)
    compiled = traced(rig.model.forward)
    with torch.inference_mode():
        record_tokens(rig, 8, compiled)
        ctx = rig.arena.prefill(prompts(3, 2, seed=4), running_tokens=8)

        found = rig.tokens.replay(8, ctx).clone()

        assert torch.equal(found, eager(rig.model.forward, ctx))
        assert rig.tokens.report().segments == len(kind.regions.names) + 1


def breaking(body):
    """The old way to declare a break: a plain function around the body."""

    def call(*args):
        recorder = RECORDING.recorder
        if recorder is None:
            body(*args)
        else:
            recorder.meet(PlainRegion(body), args)

    return call


class PlainRegion:
    """What a decorated function knows of itself."""

    name = "toy_attention"
    always_eager = False

    def __init__(self, body):
        self.body = body

    def run(self, args):
        self.body(*args)


def decorated_forward(body):
    call = breaking(body)

    def forward(step):
        x = step.token_ids[:, None].float().expand(-1, WIDTH)
        for _ in range(3):
            out = torch.empty_like(x)
            call(x, x, x, out, 0)
            x = x + out
        return x

    return forward


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_decorated_function_is_met_eagerly_and_vanishes_under_compilation():
    rig = a_rig(manifest=Manifest.of(("toy_attention", 3)))
    forward = decorated_forward(without_host_reads)

    record_tokens(rig, 8, forward)

    assert rig.tokens.report().segments == 4
    with (
        torch.inference_mode(),
        pytest.raises(RegionMismatch, match="met toy_attention 0 of 3"),
    ):
        record_tokens(rig, 8, traced(forward))


class HoldingBackend(SimBackend):
    """Keeps the arguments of regions alive, memory and all."""

    def detached(self, tensor):
        return tensor


@pytest.mark.parametrize(("backend", "grows"), [(SimBackend, False), (HoldingBackend, True)])
def test_buckets_reuse_the_memory_of_region_arguments(backend, grows):
    rig = a_rig(
        ExpertToy, buckets=(48, 64), backend=lambda: backend(CPU, chunk_bytes=SMALL_CHUNK_BYTES)
    )
    record_tokens(rig, 64)
    alone = rig.tokens.pool_bytes()

    record_tokens(rig, 48)

    assert (rig.tokens.pool_bytes() > alone) is grows


def test_pools_by_bucket_add_up():
    rig = a_rig(ExpertToy, pools="per_bucket")
    record_tokens(rig, 16)
    alone = rig.tokens.pool_bytes()

    record_tokens(rig, 8)

    assert rig.tokens.pool_bytes() > alone
