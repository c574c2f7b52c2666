"""Attention over cached rows: prefill chunks and decode rows, grouped heads, optional window."""

from tokamak.ops.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]
