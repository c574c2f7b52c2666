"""Rows that are normed, turned and rounded on their way into a cache."""

from tokamak.ops.rotate_write.reference import ROUNDED_AS, Rounded, rotate_write

__all__ = ["ROUNDED_AS", "Rounded", "rotate_write"]
