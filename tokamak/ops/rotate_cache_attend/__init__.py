"""Rotary positions, the cache write and attention of decode rows as one op: each is too short for a launch."""

from tokamak.ops.rotate_cache_attend.reference import rotate_cache_attend

__all__ = ["rotate_cache_attend"]
