"""Rotary positions: fused with the write of keys and values into the cache, or alone on the end of a head."""

from tokamak.ops.rope.pairs import rotate_pairs
from tokamak.ops.rope.reference import rotate_and_cache

__all__ = ["rotate_and_cache", "rotate_pairs"]
