"""Several matrices side by side, one for each group of a row's numbers."""

from tokamak.ops.grouped_linear.reference import grouped_linear

__all__ = ["grouped_linear"]
