"""Streams of a few widths and counts, among them rows so small that the epsilon of a norm would show."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = (
    (1, 4, 64, 1.0),
    (5, 4, 96, 1.0),
    (33, 4, 33, 1.0),
    (3, 2, 64, 1e-3),
    (2, 3, 40, 1.0),
    (0, 4, 32, 1.0),
)
"""Rows, streams, width, size of the numbers."""


def _streams(name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype) -> Tensor:
    rows, count, width, size = sizes
    return (torch.randn((rows, count, width), generator=seeded(name)) * size).to(dtype)


def _coefficients(
    name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype, outs: int, scales: int
) -> tuple[Tensor, ...]:
    _, count, width, _ = sizes
    generator = seeded(f"{name} weights")
    fn = torch.randn((outs, count * width), generator=generator) * (count * width) ** -0.5
    base = 0.5 * torch.randn(outs, generator=generator)
    scale = 1 + 0.1 * torch.randn(scales, generator=generator)
    return _streams(name, sizes, dtype), fn, base, scale


def _mix(name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype) -> tuple[object, ...]:
    outs = (2 + sizes[1]) * sizes[1]
    return *_coefficients(name, sizes, dtype, outs, 3), 1e-20, 1e-6, 20


def _head(name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype) -> tuple[object, ...]:
    return *_coefficients(name, sizes, dtype, sizes[1], 1), 1e-6, 1e-6


def _collapse(
    name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype
) -> tuple[object, ...]:
    read = torch.rand(sizes[:2], generator=seeded(f"{name} read"))
    return _streams(name, sizes, dtype), read


def _collapse_norm(
    name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype
) -> tuple[object, ...]:
    weight = 1 + 0.1 * torch.randn(sizes[2], generator=seeded(f"{name} weight"))
    return *_collapse(name, sizes, dtype), weight.to(dtype), 1e-20


def _expand(
    name: str, sizes: tuple[int, int, int, float], dtype: torch.dtype, parts: int
) -> tuple[object, ...]:
    rows, count, width, _ = sizes
    generator = seeded(f"{name} write")
    y = torch.randn((rows, width), generator=generator).to(dtype)
    write = torch.rand((rows, count), generator=generator)
    mix = torch.rand((rows, count, count), generator=generator)
    also = [torch.randn((rows, width), generator=generator).to(dtype) for _ in range(parts - 1)]
    return y, _streams(name, sizes, dtype), write, mix, *also


def _named(sizes: tuple[int, int, int, float], dtype: torch.dtype) -> str:
    rows, count, width, size = sizes
    return f"{rows}x{count}x{width} of {size:g} {str(dtype).removeprefix('torch.')}"


DTYPES = (torch.float32, torch.bfloat16)

mix_coefficients_cases = [
    Case(name, partial(_mix, name, sizes, dtype), tolerance_of(torch.float32))
    for dtype in DTYPES
    for sizes in (SIZES if dtype == torch.float32 else SIZES[:1])
    for name in [_named(sizes, dtype)]
]
head_coefficients_cases = [
    Case(name, partial(_head, name, sizes, dtype), tolerance_of(torch.float32))
    for dtype in DTYPES
    for sizes in (SIZES if dtype == torch.float32 else SIZES[:1])
    for name in [_named(sizes, dtype)]
]
collapse_streams_cases = [
    Case(name, partial(_collapse, name, sizes, dtype), tolerance_of(dtype))
    for dtype in DTYPES
    for sizes in SIZES
    for name in [_named(sizes, dtype)]
]
collapse_norm_cases = [
    Case(name, partial(_collapse_norm, name, sizes, dtype), tolerance_of(dtype))
    for dtype in DTYPES
    for sizes in SIZES
    for name in [_named(sizes, dtype)]
]
expand_streams_cases = [
    Case(name, partial(_expand, name, sizes, dtype, parts), tolerance_of(dtype))
    for dtype in DTYPES
    for parts, some in ((1, SIZES), (2, SIZES[:2]))
    for sizes in some
    for name in [f"{_named(sizes, dtype)}{' of two parts' if parts == 2 else ''}"]
]
