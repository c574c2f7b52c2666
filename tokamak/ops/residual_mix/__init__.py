"""Several residual streams: the coefficients that mix them, and their use before and behind a layer."""

from tokamak.ops.residual_mix.reference import (
    collapse_norm,
    collapse_streams,
    expand_streams,
    head_coefficients,
    mix_coefficients,
)

__all__ = [
    "collapse_norm",
    "collapse_streams",
    "expand_streams",
    "head_coefficients",
    "mix_coefficients",
]
