"""Rotary positions, fused with the write of keys and values into the cache."""

from tokamak.ops.rope.reference import rotate_and_cache

__all__ = ["rotate_and_cache"]
