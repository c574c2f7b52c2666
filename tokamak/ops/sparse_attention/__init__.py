"""Attention over the newest rows and over entries that were chosen for each query."""

from tokamak.ops.sparse_attention.reference import sparse_attention

__all__ = ["sparse_attention"]
