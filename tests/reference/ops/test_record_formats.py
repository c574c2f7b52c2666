"""Does a cache of records give back what a cache of rounded rows does, in the bytes the models' makers state?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamak.ops.quantize import fake_fp8, fake_mxfp4, fake_nvfp4
from tokamak.ops.records import (
    BF16,
    FP8,
    FP8_PLAIN_TAIL,
    FP8_WIDE,
    KV_FORMATS,
    MXFP4,
    NVFP4,
)


def fake_plain_tail(x):
    return torch.cat((fake_fp8(x[..., :-64], 64), x[..., -64:].bfloat16().to(x.dtype)), dim=-1)


FAKES = {
    "bf16": lambda x: x.bfloat16().to(x.dtype),
    "fp8": fake_fp8,
    "fp8_wide": lambda x: fake_fp8(x, 128),
    "fp8_plain_tail": fake_plain_tail,
    "mxfp4": fake_mxfp4,
    "nvfp4": fake_nvfp4,
}
FORMATS = pytest.mark.parametrize("form", KV_FORMATS.values(), ids=lambda form: form.name)


def some_rows(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-30, 30, shape[:-1], generator=generator).unsqueeze(-1)
    return (torch.randn(shape, generator=generator) * torch.exp2(powers.float())).to(dtype)


@pytest.mark.parametrize(
    ("form", "width", "expected"),
    [
        (FP8, 512, 528), (NVFP4, 512, 288), (MXFP4, 128, 68), (FP8_WIDE, 128, 132),
        (FP8_PLAIN_TAIL, 512, 584), (BF16, 512, 1024), (BF16, 128, 256),
    ],
    ids=lambda each: str(getattr(each, "name", each)),
)  # fmt: skip
def test_records_have_the_stated_size(form, width, expected):
    assert form.bytes_per_row(width) == expected
    assert form.pack(torch.zeros(3, width)).shape == (3, expected)


@pytest.mark.parametrize(
    ("rows", "keys", "expected"), [(NVFP4, MXFP4, 890), (FP8, FP8_WIDE, 1650), (BF16, BF16, 3200)]
)
def test_a_token_of_v4_1_adds_the_stated_bytes(rows, keys, expected):
    """Three layers keep a row for two tokens, and one a row for every token."""
    entries = 3 / 2 + 1

    assert entries * (rows.bytes_per_row(512) + keys.bytes_per_row(128)) == expected


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 128), (0, 512)])
def test_what_is_unpacked_is_the_row_after_its_round_trip(form, dtype, shape):
    rows = some_rows(*shape, dtype=dtype)

    found = form.unpack(form.pack(rows), shape[-1], dtype)

    expected = FAKES[form.name](rows)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert torch.equal(torch.signbit(found), torch.signbit(expected))


@FORMATS
@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_records_read_in_bfloat16_lose_nothing(form, seed):
    records = form.pack(some_rows(4, 128, seed=seed))

    found = form.unpack(records, 128, torch.bfloat16)

    assert torch.equal(found.float(), form.unpack(records, 128, torch.float32))


@FORMATS
def test_numbers_that_are_none_are_packed_without_harm_to_other_rows(form):
    rows = some_rows(3, 128)
    rows[1, 5] = torch.nan

    found = form.unpack(form.pack(rows), 128, torch.float32)

    assert found[1, 5].isnan()
    assert torch.equal(found[::2], FAKES[form.name](rows[::2]))


@FORMATS
def test_records_may_lie_in_wider_rows(form):
    rows = some_rows(4, 128)
    size = form.bytes_per_row(128)
    arena = torch.full((4, size + 13), 255, dtype=torch.uint8)
    arena[:, 5 : 5 + size] = form.pack(rows)

    found = form.unpack(arena[:, 5 : 5 + size], 128, torch.float32)

    assert torch.equal(found, FAKES[form.name](rows))


def test_codes_come_first_and_scales_last():
    row = torch.zeros(64)
    row[0], row[1], row[32] = 448.0, -448.0, 224.0

    record = FP8.pack(row).tolist()

    assert record[:2] == [0x7E, 0xFE]
    assert record[32] == 0x7E
    assert record[64:] == [127, 126]


def test_the_even_number_is_the_low_half_of_a_byte():
    row = torch.zeros(32)
    row[0], row[1], row[3] = 6.0, -0.5, 3.0

    record = MXFP4.pack(row).tolist()

    assert record[:2] == [0x97, 0x50]
    assert record[16:] == [127]


def test_the_wide_scale_is_a_float32():
    record = FP8_WIDE.pack(torch.full((128,), 100.0))

    assert record[128:].clone().view(torch.float32).tolist() == [0.25]


@pytest.mark.parametrize("form", [FP8, NVFP4], ids=lambda form: form.name)
def test_rows_and_records_of_other_sizes_are_refused(form):
    with pytest.raises(AssertionError, match="500 numbers in blocks of"):
        form.bytes_per_row(500)
    with pytest.raises(AssertionError, match=f"records of 100 bytes; {form.name} rows of 512"):
        form.unpack(torch.zeros((2, 100), dtype=torch.uint8), 512, torch.float32)


def test_rows_that_were_rounded_before_may_lose_digits():
    """Why ops pack what was computed: with the smallest scales, a second trip takes another one."""
    row = torch.zeros(16)
    row[0] = 9.0 * 2.0**-9

    once = NVFP4.unpack(NVFP4.pack(row), 16, torch.float32)

    assert not torch.equal(NVFP4.unpack(NVFP4.pack(once), 16, torch.float32), once)
