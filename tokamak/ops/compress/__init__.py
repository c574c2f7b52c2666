"""Rows of a cache written one by one, and groups of them folded into compressed entries."""

from tokamak.ops.compress.reference import fold_groups, write_rows

__all__ = ["fold_groups", "write_rows"]
