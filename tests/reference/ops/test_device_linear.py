"""Does a device's linear layer compute the same for few rows, fused, and for many, with a sum pending?"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.reference.ops import formulas
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import cpu_facts
from tokamak.errors import NoBackendError
from tokamak.ops.case import difference
from tokamak.ops.linear import DeviceLinear, pack_with_reason
from tokamak.ops.linear.few_rows import (
    FEW_ROWS,
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.few_rows_cases import (
    few_rows_after_norm_cases,
    few_rows_gated_cases,
    few_rows_into_cases,
    few_rows_linear_cases,
)
from tokamak.ops.linear.tile import (
    FUSED_ROWS,
    MEASURED,
    NORMED_ROWS,
    Tile,
    fused_rows,
    row_class,
    tile_for,
)
from tokamak.ops.load import load_backends

load_backends()

WIDTH, FEATURES, EPS = 64, 96, 1e-6
FUSED = fused_rows(FEATURES, WIDTH)
ROWS = (1, FUSED, FUSED + 1, 40)
GPU_WITHOUT_KERNELS = replace(cpu_facts(), vendor="nvidia", arch="sm90", libraries=frozenset())


def a_linear(features=FEATURES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((features, WIDTH), generator=generator) * WIDTH**-0.5
    return DeviceLinear(weight.to(dtype), cpu_facts())


def numbers(rows, width, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, width), generator=generator).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_a_wide_weight_takes_narrow_rows(rows):
    linear, x = a_linear(), numbers(rows, WIDTH, 4, torch.bfloat16)

    found = linear(x)

    assert found.dtype == torch.float32
    assert difference((found,), (x.float() @ linear.weight.T,)) < 2e-5


def norm_weight(dtype=torch.float32):
    return (1 + 0.2 * numbers(1, WIDTH, 9)[0]).to(dtype)


def product(x, weight):
    return formulas.wide(x) @ formulas.wide(weight).T


def formula(name, arguments):
    if name == "few_rows_linear":
        x, weight, _ = arguments
        return (product(x, weight),)
    if name == "few_rows_into":
        x, weight, residual = arguments
        total = formulas.wide(residual) + product(x, weight)
        return total, total
    residual, norm, eps, weight = arguments[:4]
    normed = formulas.wide(residual) if norm is None else formulas.rms_norm(residual, norm, eps)
    y = normed @ formulas.wide(weight).T
    if name == "few_rows_after_norm":
        return (y,)
    gate, up = np.split(y, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up,)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op.name}: {case}")
        for op, cases in (
            (few_rows_linear, few_rows_linear_cases),
            (few_rows_after_norm, few_rows_after_norm_cases),
            (few_rows_gated, few_rows_gated_cases),
            (few_rows_into, few_rows_into_cases),
        )
        for case in cases
    ],
)
def test_the_references_agree_with_the_formulas_in_float64(op, case):
    expected = [torch.from_numpy(array) for array in formula(op.name, case.make())]

    found = case.outcome(op.reference)

    assert difference(found, expected) <= case.tolerance


@pytest.mark.parametrize("rows", ROWS)
def test_products_and_scores_are_those_of_the_matrix(rows):
    linear, x = a_linear(), numbers(rows, WIDTH, 1)
    expected = torch.from_numpy(product(x, linear.weight))

    found, scores = linear(x), linear.scores(x)

    assert difference([found, scores], [expected, expected]) < 2e-5


@pytest.mark.parametrize("rows", ROWS)
def test_scores_of_16_bit_rows_keep_float32_sums(rows):
    dtype = torch.bfloat16
    linear, x = a_linear(dtype=dtype), numbers(rows, WIDTH, 1, dtype)
    expected = torch.from_numpy(product(x, linear.weight))

    scores = linear.scores(x)
    normed = linear.scores_after_norm(x, norm_weight(dtype), EPS)

    assert scores.dtype == normed.dtype == torch.float32
    assert difference([scores], [expected]) < 2e-5
    assert difference([linear(x)], [expected]) > 1e-4


@pytest.mark.parametrize("rows", ROWS)
def test_a_layer_is_the_same_whether_its_sum_is_added_at_once_or_by_the_next_norm(rows):
    down, up = a_linear(WIDTH), a_linear()
    x, stream = numbers(rows, WIDTH, 1), numbers(rows, WIDTH, 2)
    total = formulas.wide(stream) + product(x, down.weight)
    normed = formulas.rms_norm(torch.from_numpy(total), norm_weight(), EPS)
    y = normed @ formulas.wide(up.weight).T
    gate, other = np.split(y, 2, axis=1)
    gated = gate / (1 + np.exp(-gate)) * other

    streams = [stream.clone() for _ in range(3)]
    pending = [down.into(x, each) for each in streams]
    found = [
        up.after_norm(pending[0], streams[0], norm_weight(), EPS),
        up.gated_after_norm(pending[1], streams[1], norm_weight(), EPS),
    ]

    assert all((each is None) == (rows <= FUSED) for each in pending)
    expected = [torch.from_numpy(each) for each in (y, gated, total, total)]
    assert difference([*found, *streams[:2]], expected) < 1e-4
    if rows <= FUSED:
        scores = up.scores_after_norm(streams[2], norm_weight(), EPS)
        assert difference([scores], [torch.from_numpy(y)]) < 1e-4


def test_few_rows_with_a_sum_pending_add_it_once():
    linear, x, stream = a_linear(), numbers(3, WIDTH, 1), numbers(3, WIDTH, 2)
    total = stream + x

    found = linear.after_norm(x, stream, norm_weight(), EPS)

    assert torch.equal(stream, total)
    expected = linear.after_norm(None, total, norm_weight(), EPS)
    assert difference([found], [expected]) < 2e-5


def test_a_weight_that_the_library_multiplies_faster_leaves_its_sum_pending(monkeypatch):
    monkeypatch.setitem(FUSED_ROWS, (WIDTH, WIDTH, False), 2)
    linear, stream = a_linear(WIDTH), numbers(3, WIDTH, 2)
    x = numbers(3, WIDTH, 1)

    two, three = linear.into(x[:2], stream[:2]), linear.into(x, stream.clone())

    assert two is None
    assert three is not None
    assert difference([three], [torch.from_numpy(product(x, linear.weight))]) < 2e-5


def test_the_border_of_gate_and_up_is_its_own(monkeypatch):
    monkeypatch.setitem(FUSED_ROWS, (FEATURES, WIDTH, True), 1)

    linear = a_linear()

    assert linear.gated_rows == 1
    assert linear.fused_rows == FUSED


@pytest.mark.parametrize("most", [0, 2])
def test_rows_that_a_kernel_does_not_norm_itself_are_normed_in_front_of_it(monkeypatch, most):
    for gated in (False, True):
        monkeypatch.setitem(NORMED_ROWS, (FEATURES, WIDTH, gated), most)
    stream, apart = numbers(3, WIDTH, 2), a_linear()
    monkeypatch.undo()
    whole = a_linear()

    found, expected = (
        [
            each.after_norm(None, stream, norm_weight(), EPS),
            each.gated_after_norm(None, stream, norm_weight(), EPS),
            each.scores_after_norm(stream, norm_weight(), EPS),
        ]
        for each in (apart, whole)
    )

    assert (apart.normed_rows, apart.gated_normed_rows, apart.fused_rows) == (most, most, FUSED)
    assert whole.normed_rows == FUSED
    assert difference(found, expected) < 2e-5


def test_a_large_weight_of_unknown_shape_is_fused_for_fewer_rows_than_a_small_one():
    assert fused_rows(5120, 2048) == 16
    assert fused_rows(16384, 4096) == 8


def test_rows_take_the_tile_measured_for_them_or_else_for_eight():
    shape, fast = (6144, 4096), {"registers": True}

    tiles = [tile_for(rows, *shape, **fast) for rows in (1, 2, 3, 8)]
    two = tile_for(2, 1024, 3072, **fast)

    assert tiles == [MEASURED[1, *shape, False]] + 3 * [MEASURED[8, *shape, False]]
    assert two == MEASURED[2, 1024, 3072, False]


def test_a_chip_without_kernels_out_of_registers_gets_a_tile_of_another_kind(monkeypatch):
    wanted = Tile(16, 64, 4, registers=True)
    monkeypatch.setitem(MEASURED, (8, 512, 1024, False), wanted)

    found = [tile_for(8, 512, 1024, registers=has) for has in (True, False)]

    assert found[0] == wanted
    assert not found[1].registers


def test_no_rows_make_no_rows():
    linear, nothing = a_linear(), torch.zeros((0, WIDTH))

    assert linear(nothing).shape == (0, FEATURES)
    assert linear.gated_after_norm(None, nothing, norm_weight(), EPS).shape == (0, FEATURES // 2)


def test_a_gpu_gets_a_matrix_in_the_dtype_of_the_model():
    weight = DenseWeight(numbers(FEATURES, WIDTH, 5))

    packed, why = pack_with_reason(
        weight,
        dtype=torch.bfloat16,
        exact=False,
        facts=GPU_WITHOUT_KERNELS,
        head=False,
        prefer=None,
        device=torch.device("cpu"),
    )

    assert isinstance(packed, DeviceLinear)
    assert packed.form == "device"
    assert packed.weight.dtype == torch.bfloat16
    assert {choice.backend for choice in packed.choices} == {"reference"}
    assert why == "a matrix on the device"


@pytest.mark.parametrize("name", ["dense", "device"])
def test_a_gpus_form_can_be_asked_for_by_name(name):
    weight = DenseWeight(numbers(FEATURES, WIDTH, 5))

    packed, why = pack_with_reason(
        weight,
        dtype=torch.float32,
        exact=True,
        facts=GPU_WITHOUT_KERNELS,
        head=True,
        prefer=name,
    )

    assert (packed.form, why) == (name, "asked for")


def test_a_form_of_the_cpu_is_refused_on_a_gpu():
    weight = DenseWeight(numbers(FEATURES, WIDTH, 5))

    with pytest.raises(NoBackendError, match="no form 'onednn'") as error:
        pack_with_reason(
            weight,
            dtype=torch.float32,
            exact=False,
            facts=GPU_WITHOUT_KERNELS,
            head=False,
            prefer="onednn",
        )

    assert error.value.hint == "it has device, dense"


@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
def test_every_tile_is_one_that_the_kernels_can_be_compiled_for(rows):
    shapes = [(6144, 4096, False), (28672, 4096, True), (1, 32, False), (2, 33, True)]
    shapes += [(features, columns, gated) for _, features, columns, gated in MEASURED]

    for features, columns, gated in shapes:
        tile = tile_for(rows, features, columns, gated=gated)
        for number in (tile.features, tile.columns, tile.warps):
            assert number & (number - 1) == 0, tile
        assert rows <= row_class(rows) <= FEW_ROWS
        # Tensor cores multiply 16 columns at a time.
        assert tile.columns >= 16
