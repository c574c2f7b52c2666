"""Rows to low precision: round trips that caches make, and 8-bit numbers for products."""

from tokamak.ops.quantize.reference import fake_fp8, fake_mxfp4, fake_nvfp4
from tokamak.ops.quantize.rows import quantize_rows

__all__ = ["fake_fp8", "fake_mxfp4", "fake_nvfp4", "quantize_rows"]
