"""Products with weights that are stored in 8-bit floating-point numbers."""

from tokamak.ops.quant_linear.reference import ScaleBlocks, group_of, scaled_linear

__all__ = ["ScaleBlocks", "group_of", "scaled_linear"]
