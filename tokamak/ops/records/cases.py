"""Rows of all sizes of numbers as records of every format that kernels know, and rows nobody wants."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded
from tokamak.ops.compress.cases import places_of_tokens
from tokamak.ops.records.formats import FP8, MXFP4, NVFP4, KVFormat


def _write(
    name: str, rows: int, width: int, form: KVFormat, dtype: torch.dtype, ratio: int
) -> tuple[object, ...]:
    generator = seeded(name)
    shape = (6, 1, 8, form.bytes_per_row(width))
    cache = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    positions, slots = places_of_tokens(rows, ratio, generator)
    powers = torch.randint(-14, 14, (rows, width // 16), generator=generator).repeat_interleave(
        16, 1
    )
    numbers = torch.randn((rows, width), generator=generator) * torch.exp2(powers.float())
    numbers[2:3] = 0.0
    return cache, numbers.to(dtype), slots, positions, ratio, form


write_records_cases = [
    Case(title, partial(_write, title, rows, width, form, dtype, ratio), 0.0, changed=(0,))
    for form in (FP8, NVFP4, MXFP4)
    for rows, width, dtype, ratio in (
        (0, 64, torch.float32, 1),
        (5, 96, torch.float32, 1),
        (17, 512, torch.bfloat16, 2),
    )
    for title in [f"{rows} rows of {width} by {ratio} as {form.name}"]
]
