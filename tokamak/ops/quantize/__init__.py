"""Rows to the low precision that caches keep, and back."""

from tokamak.ops.quantize.reference import fake_fp8, fake_mxfp4, fake_nvfp4

__all__ = ["fake_fp8", "fake_mxfp4", "fake_nvfp4"]
