"""Inputs of the products of few rows: weights that tiles divide, weights that nothing divides, 1 to 40 rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = (
    (1, 24, 256), (1, 10, 300), (1, 6, 3072), (1, 2, 32),
    (2, 64, 512), (5, 36, 300), (8, 32, 1024), (9, 34, 96), (16, 32, 256), (27, 34, 96), (32, 32, 256), (40, 64, 64), (0, 32, 64),
)  # fmt: skip
"""Rows, features and columns; features are even, so that each weight may be gate and up."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """Rows times a weight in a dtype."""

    rows: int
    features: int
    columns: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rows} rows times {self.features}x{self.columns} {dtype}"

    def numbers(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        """Random numbers, the same for the same size and shape."""
        generator = seeded(f"{self} {rows} {columns} {scale}")
        return (torch.randn((rows, columns), generator=generator) * scale).to(self.dtype)

    def x(self) -> Tensor:
        """Rows with a gap behind each, as part of a wider matrix has."""
        return self.numbers(self.rows, self.columns + 16)[:, : self.columns]

    def weight(self) -> Tensor:
        """A weight that keeps the scale of rows."""
        return self.numbers(self.features, self.columns, self.columns**-0.5)

    def norm_weight(self) -> Tensor:
        """A norm's weight: around one, as those of models are."""
        return 1 + self.numbers(1, self.columns, 0.2)[0]

    def stream(self, width: int) -> Tensor:
        """Rows of a residual stream: larger than what is added to it."""
        return self.numbers(self.rows, width, 3.0)


def _linear(size: Size, out_dtype: torch.dtype) -> tuple[object, ...]:
    return size.x(), size.weight(), out_dtype


def _widened(size: Size) -> tuple[object, ...]:
    return size.x(), size.weight().float(), torch.float32


def _after_norm(size: Size, out_dtype: torch.dtype) -> tuple[object, ...]:
    return size.stream(size.columns), size.norm_weight(), EPS, size.weight(), out_dtype


def _gated(size: Size) -> tuple[object, ...]:
    return size.stream(size.columns), size.norm_weight(), EPS, size.weight()


def _gated_only(size: Size) -> tuple[object, ...]:
    return size.stream(size.columns), None, EPS, size.weight()


def _into(size: Size) -> tuple[object, ...]:
    return size.x(), size.weight(), size.stream(size.features)


sizes = [Size(*numbers, dtype) for dtype in DTYPES for numbers in SIZES]
NORMED = 2.0**-5
"""A norm's result is rounded to 16 bits at other points, and a product sums those differences."""


def _normed_tolerance(size: Size) -> float:
    return tolerance_of(size.dtype) if size.dtype == torch.float32 else NORMED


few_rows_linear_cases = [
    Case(f"{size} to {kind}", partial(_linear, size, out_dtype), tolerance_of(size.dtype))
    for size in sizes
    for kind, out_dtype in (("its dtype", size.dtype), ("float32", torch.float32))
]
few_rows_linear_cases += [
    Case(f"{size} in float32", partial(_widened, size), tolerance_of(torch.float32))
    for size in sizes
    if size.dtype == torch.bfloat16 and size.rows in (1, 5, 9)
]
few_rows_after_norm_cases = [
    Case(f"{size} to {kind}", partial(_after_norm, size, out_dtype), _normed_tolerance(size))
    for size in sizes
    for kind, out_dtype in (("its dtype", size.dtype), ("float32", torch.float32))
]
few_rows_gated_cases = [
    Case(f"{size}{note}", partial(make, size), _normed_tolerance(size))
    for size in sizes
    for make, note in ((_gated, ""), (_gated_only, " without a norm"))
]
few_rows_into_cases = [
    Case(str(size), partial(_into, size), _normed_tolerance(size), changed=(2,)) for size in sizes
]
