"""The residual stream: adding to it, and its root-mean-square norm."""

from tokamak.ops.norm.reference import add_residual, add_rms_norm, rms_norm

__all__ = ["add_residual", "add_rms_norm", "rms_norm"]
