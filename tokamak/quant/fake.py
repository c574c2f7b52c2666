"""Round trips through the number formats of caches, by the names that models use.

They are the ops of `tokamak/ops/quantize`: a call runs the reference, and a layer binds them like any op.
"""

from tokamak.ops.quantize import fake_fp8, fake_mxfp4, fake_nvfp4

__all__ = ["fake_fp8", "fake_mxfp4", "fake_nvfp4"]
