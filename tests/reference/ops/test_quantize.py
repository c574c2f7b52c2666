"""Do rows come back from the block formats as the formats define, by an account of them in float64?"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamak.core.minifloat import (
    E2M1_MOST,
    UE8M0,
    e2m1_of,
    float_of_e2m1,
    float_of_ue8m0,
    pack_nibbles,
    ue8m0_at_least,
    unpack_nibbles,
)
from tokamak.ops.quantize import fake_fp8, fake_mxfp4, fake_nvfp4
from tokamak.ops.quantize.blocks import encode_fp8, encode_mxfp4, encode_nvfp4

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SAMPLE = (0.11, -0.52, 0.73, 1.0, -2.2, 0.9, 0.026, -0.3)
FAKES = (fake_fp8, fake_mxfp4, fake_nvfp4)
BLOCKS = {"fake_fp8": 32, "fake_mxfp4": 32, "fake_nvfp4": 16}
E4M3_GRID = np.array(
    sorted(
        {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
        | {m / 8 * 2.0**-6 for m in range(8)}
    )
)


def nearest(size, grid):
    """The grid's number nearest to a size; of two as near, the one with the even code."""
    at = min(int(np.searchsorted(grid, size)), len(grid) - 1)
    low, high = grid[max(at - 1, 0)], grid[at]
    if size - low != high - size:
        return low if size - low < high - size else high
    return low if max(at - 1, 0) % 2 == 0 else high


def by_formula(kind, block):
    """A block's round trip, number by number. block: float32 numbers."""
    largest = max(abs(float(each)) for each in block)
    if kind == "fake_nvfp4":
        wanted = np.float32(max(largest, 6 * 2.0**-9)) / np.float32(6)
        scale, grid = nearest(min(float(wanted), 448.0), E4M3_GRID), GRID
    else:
        least, most, grid = (
            (1e-4, 448.0, E4M3_GRID) if kind == "fake_fp8" else (6 * 2.0**-126, 6.0, GRID)
        )
        wanted = np.float32(np.float32(max(largest, least)) * np.float32(1 / most))
        scale = 2.0 ** math.ceil(math.log2(float(wanted)))
    signed = [np.float32(each) / np.float32(scale) for each in block]
    return [
        math.copysign(nearest(min(abs(float(s)), float(grid[-1])), grid) * scale, s) for s in signed
    ]


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-2.0**120, max_value=2.0**120)  # fmt: skip
near_one = st.floats(width=32, min_value=-8, max_value=8)
quarters = st.integers(-24, 24).map(lambda n: n / 4)


@st.composite
def rows(draw, numbers=floats):
    count = draw(st.integers(1, 3))
    values = draw(st.lists(numbers, min_size=32 * count, max_size=32 * count))
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (fake_fp8, [0.109375, -0.5, 0.75, 1.0, -2.25, 0.875, 0.025390625, -0.3125]),
        (fake_mxfp4, [0.0, -0.5, 0.75, 1.0, -2.0, 1.0, 0.0, -0.25]),
        (fake_nvfp4, [0.1875, -0.5625, 0.75, 1.125, -2.25, 0.75, 0.0, -0.375]),
    ],
    ids=lambda each: getattr(each, "name", None),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_the_models_makers(fake, expected, dtype):
    x = torch.tensor([*SAMPLE, *[0.0] * 24]).to(dtype)

    found = fake(x)

    assert found.dtype == dtype
    assert found.tolist() == [*expected, *[0.0] * 24]


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
@given(x=rows() | rows(near_one) | rows(quarters))
@settings(max_examples=60, deadline=None)
def test_every_block_is_what_the_formula_makes_of_it(fake, x):
    found = fake(x)

    blocks = x.view(-1, BLOCKS[fake.name])
    expected = [by_formula(fake.name, block.tolist()) for block in blocks]
    assert found.view(blocks.shape).tolist() == expected


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
@given(x=rows() | rows(near_one))
@settings(max_examples=60, deadline=None)
def test_results_are_numbers_of_bfloat16_and_stay_what_they_are(fake, x):
    found = fake(x)

    assert torch.equal(found.bfloat16().float(), found)
    assert torch.equal(fake(found.bfloat16()).float(), fake(found))
    largest = x.view(-1, BLOCKS[fake.name]).abs().amax(-1, keepdim=True)
    odd = (fake is fake_nvfp4) & (largest >= 9 * 2**-9) & (largest <= 10 * 2**-9)
    again = torch.where(odd, found.view(odd.shape[0], -1), fake(found).view(odd.shape[0], -1))
    assert torch.equal(again.flatten(), found)


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
@given(x=rows() | rows(near_one))
@settings(max_examples=60, deadline=None)
def test_within_a_block_order_and_signs_are_kept(fake, x):
    blocks = x.view(-1, BLOCKS[fake.name])
    order = blocks.argsort(dim=-1)

    found = fake(x).view(blocks.shape)

    assert (found.gather(-1, order).diff(dim=-1) >= 0).all()
    assert torch.equal(torch.signbit(found), torch.signbit(blocks))


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_none_spoils_its_block_and_no_other(fake, wrong):
    x = torch.linspace(-3, 3, 96)
    expected = fake(x)
    x[40] = wrong

    found = fake(x)

    block = BLOCKS[fake.name]
    spoilt = torch.arange(96) // block == 40 // block
    assert found[spoilt].isnan().all()
    assert torch.equal(found[~spoilt], expected[~spoilt])


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
def test_the_smallest_numbers_become_zeros_of_their_sign(fake):
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45] * 8)

    found = fake(x)

    assert found.tolist() == [0.0] * 32
    assert torch.equal(torch.signbit(found), torch.signbit(x))


def test_sizes_beyond_the_largest_scale_of_nvfp4_are_cut_off():
    x = torch.tensor([3000.0, -1e30, 2688.0, 1.0] * 4)

    assert fake_nvfp4(x).tolist() == [2688.0, -2688.0, 2688.0, 0.0] * 4


def test_scales_are_shared_by_blocks_of_the_last_axis():
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(3))

    shapes = [
        [tuple(part.shape) for part in encoded]
        for encoded in (encode_fp8(x), encode_fp8(x, 128), encode_mxfp4(x), encode_nvfp4(x))
    ]

    assert shapes == [
        [(2, 3, 256), (2, 3, 8)],
        [(2, 3, 256), (2, 3, 2)],
        [(2, 3, 128), (2, 3, 8)],
        [(2, 3, 128), (2, 3, 16)],
    ]


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
def test_rows_that_are_no_whole_blocks_are_refused(fake):
    with pytest.raises(AssertionError, match="40 numbers in blocks of"):
        fake(torch.zeros(2, 40))


def test_halves_go_to_the_even_code():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])

    assert float_of_e2m1(e2m1_of(halves)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert float_of_e2m1(e2m1_of(-halves)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_all_codes_of_four_bits_come_back():
    codes = torch.arange(16, dtype=torch.uint8)

    numbers = float_of_e2m1(codes)

    assert numbers[:8].tolist() == list(GRID)
    assert torch.equal(numbers[8:], -numbers[:8])
    assert torch.equal(e2m1_of(numbers), codes)
    assert GRID[-1] == E2M1_MOST


def test_the_even_column_is_the_low_half_of_a_byte():
    codes = torch.arange(16, dtype=torch.uint8)

    packed = pack_nibbles(codes)

    assert packed[:2].tolist() == [0x10, 0x32]
    assert torch.equal(unpack_nibbles(packed), codes)


def test_scale_bytes_are_powers_of_two():
    scales = torch.arange(256, dtype=torch.uint8).view(UE8M0)

    numbers = float_of_ue8m0(scales)

    assert numbers[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert numbers[255].isnan()
    assert torch.equal(ue8m0_at_least(numbers[1:]).view(torch.uint8), scales.view(torch.uint8)[1:])


@given(st.floats(width=32, min_value=2.0**-126, max_value=2.0**127))
def test_a_scale_is_the_next_power_of_two(number):
    (byte,) = ue8m0_at_least(torch.tensor([number])).view(torch.uint8).tolist()

    assert 2.0 ** (byte - 128) < number <= 2.0 ** (byte - 127)
