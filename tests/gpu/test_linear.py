"""Do products of few rows on a device agree with their references, without waits, and in a recording?"""

from dataclasses import replace

import pytest
import torch

from tests.support.device import no_host_wait
from tokamak.device.facts import cpu_facts
from tokamak.ops.case import difference
from tokamak.ops.linear import DeviceLinear
from tokamak.ops.linear.few_rows import (
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.few_rows_cases import (
    EPS,
    Size,
    few_rows_after_norm_cases,
    few_rows_gated_cases,
    few_rows_into_cases,
    few_rows_linear_cases,
)
from tokamak.ops.linear.tile import Tile
from tokamak.ops.load import load_backends
from tokamak.ops.quant_linear import ScaleBlocks, scaled_linear
from tokamak.ops.quant_linear.cases import TOLERANCE, scaled_numbers

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
load_backends()


def is_hopper():
    return HAS_GPU and torch.cuda.get_device_capability()[0] == 9


OPS = (
    (few_rows_linear, few_rows_linear_cases),
    (few_rows_after_norm, few_rows_after_norm_cases),
    (few_rows_gated, few_rows_gated_cases),
    (few_rows_into, few_rows_into_cases),
)
NAMES = ("triton", "triton_sm90") if is_hopper() else ("triton",)
MATRICES = [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (6144, 4096), (128, 2048),
]  # fmt: skip
TILE_FOR = "tokamak.ops.linear.triton_few.tile_for"
FORMS = {
    "chosen": None, "lanes": Tile(4, 1024, 4), "lanes overlapping": Tile(2, 512, 2, overlaps=True),
    "cores": Tile(16, 64, 4, 4), "cores overlapping": Tile(32, 64, 4, 4, overlaps=True),
    "registers": Tile(16, 64, 4, registers=True), "registers overlapping": Tile(32, 128, 8, overlaps=True, registers=True),
}  # fmt: skip


def on_device(call, case):
    def run(*arguments):
        moved = [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]
        with no_host_wait():
            result = call(*moved)
        for place in case.changed:
            arguments[place].copy_(moved[place])
        return result.cpu()

    return case.outcome(run)


def backend(op, name):
    return next(each.call for each in op.backends if each.name == name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("op", "cases"), OPS, ids=[op.name for op, _ in OPS])
def test_kernels_on_the_device_agree_with_the_reference(op, cases, name):
    call = backend(op, name)

    for case in cases:
        gap = difference(on_device(call, case), case.outcome(op.reference))
        assert gap <= case.tolerance, f"{op.name}: {case}"


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("features", "columns"), MATRICES)
def test_matrices_of_real_models_are_as_exact_as_their_references(
    monkeypatch, rows, features, columns
):
    """Of millions of numbers some differ by many roundings, so both are measured by what is true."""
    size = Size(rows, features, columns, torch.bfloat16)
    weight, norm, x = size.weight().cuda(), size.norm_weight().cuda(), size.x().cuda()
    stream, wide = size.stream(columns).cuda(), size.stream(features).cuda()
    calls = {
        few_rows_linear: (x, weight, torch.float32),
        few_rows_after_norm: (stream, norm, EPS, weight, torch.bfloat16),
        few_rows_gated: (stream, norm, EPS, weight),
        few_rows_into: (x, weight, wide),
    }

    for op, arguments in calls.items():
        true = op.reference(*[exact(each) for each in arguments])
        near = difference([op.reference(*map(fresh, arguments))], [true])
        for form, tile in FORMS.items():
            for name in NAMES:
                if tile is not None and not takes(tile, rows, name):
                    continue
                with monkeypatch.context() as patch:
                    if tile is not None:
                        patch.setattr(TILE_FOR, lambda *_, tile=tile, **__: tile)
                    found = backend(op, name)(*map(fresh, arguments))
                gap = difference([found], [true])
                assert gap <= 1.5 * near + 1e-4, f"{op.name} {name} {form}"


def takes(tile, rows, name):
    if tile.registers and name != "triton_sm90":
        return False
    return rows > 1 if tile.stages or tile.registers else rows <= 8


def exact(argument):
    if isinstance(argument, torch.dtype):
        return torch.float64
    return argument.double() if isinstance(argument, torch.Tensor) else argument


def fresh(argument):
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_recording_of_a_layer_holds_for_other_rows(rows):
    facts = replace(cpu_facts(), vendor="nvidia", arch="sm90", libraries=frozenset({"triton"}))
    up_size, down_size = (
        Size(rows, 512, 256, torch.bfloat16),
        Size(rows, 256, 256, torch.bfloat16),
    )
    up = DeviceLinear(up_size.weight().cuda(), facts)
    down = DeviceLinear(down_size.weight().cuda(), facts)
    norm, stream = up_size.norm_weight().cuda(), torch.zeros((rows, 256)).bfloat16().cuda()

    def layer(stream):
        hidden = up.gated_after_norm(None, stream, norm, EPS)
        assert down.into(hidden, stream) is None
        return up.scores_after_norm(stream, norm, EPS)

    layer(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(stream)
    fresh = up_size.stream(256).cuda()
    expected = layer(fresh.clone())

    stream.copy_(fresh)
    graph.replay()

    assert torch.equal(recorded, expected)


@pytest.mark.parametrize("rows", [4, 80])
def test_scales_far_from_one_are_exact_and_no_number_becomes_one(rows):
    # Only on a device two numbers are widened at a time, by factors of a range of their own.
    blocks, generator = ScaleBlocks(32, 32, power_of_two=True), torch.Generator().manual_seed(0)
    codes, _ = scaled_numbers((256, 256), blocks, generator)
    x = torch.randn((rows, 256), generator=generator).bfloat16()
    powers = torch.tensor([-53.0, -40, -10, 0, 20, 60, 71, torch.nan]).exp2()
    given = x, codes, powers[:, None].expand(8, 8).contiguous()
    expected = scaled_linear.reference(*given, blocks, torch.float32)

    moved = [each.cuda() for each in given]
    found = backend(scaled_linear, "triton")(*moved, blocks, torch.float32).cpu()

    each = powers.repeat_interleave(32)
    gaps, sizes = ((found - expected) / each)[:, :-32], (expected / each)[:, :-32]
    assert gaps.abs().max() <= TOLERANCE * sizes.abs().max()
    assert expected[:, -32:].isnan().all()
    assert not found[:, -32:].isfinite().any()
