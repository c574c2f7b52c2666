"""Root-mean-square norm, alone and fused with the residual add."""

from tokamak.ops.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
