"""Rows to numbers of 8 bits with a scale per group of columns."""

from tokamak.ops.quantize.reference import quantize_rows

__all__ = ["quantize_rows"]
