"""Gated activations."""

from tokamak.ops.activation.limited import silu_mul_limited
from tokamak.ops.activation.reference import silu_mul

__all__ = ["silu_mul", "silu_mul_limited"]
