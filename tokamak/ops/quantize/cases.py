"""Inputs of the round trips: widths of caches and index keys, sizes from nothing to beyond the formats, halfway cases."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded

SIZES = ((1, 512), (3, 128), (0, 64), (33, 64))
DTYPES = (torch.float32, torch.bfloat16)


def _rows(name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((rows, width), generator=seeded(name)).to(dtype)


def _of_all_sizes(name: str, dtype: torch.dtype) -> Tensor:
    """Rows from the smallest numbers to nearly the largest, a row of zeros among them.

    Of bfloat16 only numbers above 2^-126: Triton's interpreter reads smaller ones wrong.
    """
    smallest = -150 if dtype == torch.float32 else -90
    powers = torch.arange(smallest, 120, 3, dtype=torch.float64)
    numbers = torch.randn((len(powers), 128), generator=seeded(name), dtype=torch.float64)
    numbers *= torch.exp2(powers).unsqueeze(-1)
    numbers[7] = 0.0
    return numbers.to(dtype)


def _halfway(name: str, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/4 below 6, in blocks whose scale is 1 in both formats of 4 bits, and their tenths."""
    numbers = torch.randint(-24, 25, (8, 128), generator=seeded(name)) / 4.0
    numbers[:, ::16] = 6.0
    return torch.cat((numbers, numbers / 10)).to(dtype)


def _not_finite(name: str, dtype: torch.dtype) -> Tensor:
    numbers = _rows(name, 8, 128, torch.float32)
    numbers[0, 3], numbers[2, 70], numbers[5, 127] = torch.inf, -torch.inf, torch.nan
    return numbers.to(dtype)


def _columns(name: str) -> Tensor:
    return _rows(name, 9, 256, torch.bfloat16)[::2, 64:192]


def _make(make: partial[Tensor], *more: int) -> tuple[object, ...]:
    return make(), *more


def _inputs() -> dict[str, partial[Tensor]]:
    found: dict[str, partial[Tensor]] = {"rows in a wider matrix": partial(_columns, "columns")}
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for rows, width in SIZES:
            name = f"{rows}x{width} {kind}"
            found[name] = partial(_rows, name, rows, width, dtype)
        for title, make in (
            ("all sizes", _of_all_sizes),
            ("halfway", _halfway),
            ("not finite", _not_finite),
        ):
            found[f"{title} {kind}"] = partial(make, title, dtype)
    return found


fake_mxfp4_cases = [Case(name, partial(_make, make), 0.0) for name, make in _inputs().items()]

fake_nvfp4_cases = [Case(name, partial(_make, make), 0.0) for name, make in _inputs().items()]

fake_fp8_cases = [
    Case(f"{name} by {block}", partial(_make, make, block), 0.0)
    for name, make in _inputs().items()
    for block in (32, 64, 128)
    if block == 32 or name.startswith(("1x512", "all sizes"))
]
