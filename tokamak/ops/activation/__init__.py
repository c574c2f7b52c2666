"""Gated activations."""

from tokamak.ops.activation.reference import silu_mul

__all__ = ["silu_mul"]
