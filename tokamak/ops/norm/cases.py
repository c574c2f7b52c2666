"""Inputs of the norms: widths of real models, widths that no vector divides, one row to many."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = ((1, 576), (3, 100), (5, 17), (8, 576), (33, 2048), (0, 64))
DTYPES = (torch.float32, torch.bfloat16)


def _numbers(name: str, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = seeded(name)
    shapes = ((rows, width), (rows, width), (width,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _rms_norm(name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[object, ...]:
    x, _, weight = _numbers(name, rows, width, dtype)
    return x, weight, 1e-5


def _add_rms_norm(name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[object, ...]:
    x, residual, weight = _numbers(name, rows, width, dtype)
    return x, residual, weight, 1e-5


def _strided(name: str) -> tuple[object, ...]:
    x, _, weight = _numbers(name, 9, 64, torch.float32)
    return x[::3], weight, 1e-6


def _name(rows: int, width: int, dtype: torch.dtype) -> str:
    return f"{rows}x{width} {str(dtype).removeprefix('torch.')}"


rms_norm_cases = [
    Case(name, partial(_rms_norm, name, rows, width, dtype), tolerance_of(dtype))
    for dtype in DTYPES
    for rows, width in SIZES
    for name in [_name(rows, width, dtype)]
] + [Case("every third row", partial(_strided, "every third row"), tolerance_of(torch.float32))]


def _add_residual(name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[object, ...]:
    x, residual, _ = _numbers(name, rows, width, dtype)
    return x, residual


add_residual_cases = [
    Case(name, partial(_add_residual, name, rows, width, dtype), tolerance_of(dtype), changed=(1,))
    for dtype in DTYPES
    for rows, width in SIZES
    for name in [_name(rows, width, dtype)]
]

add_rms_norm_cases = [
    Case(name, partial(_add_rms_norm, name, rows, width, dtype), tolerance_of(dtype), changed=(1,))
    for dtype in DTYPES
    for rows, width in SIZES
    for name in [_name(rows, width, dtype)]
]
