"""Which sub-caches share a block table, because they cover tokens alike.

In: the sub-caches a model declares. Out: groups, in order of declaration, named after their first member.
Integers only: no tensor is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokamak.cache.sub_cache import SubCache


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Sub-caches with one block table: the same tokens a row, the same retention."""

    name: str
    sub_caches: tuple[SubCache, ...]
    stride_tokens: int
    keep_tokens: int


def group_sub_caches(sub_caches: Sequence[SubCache]) -> tuple[CacheGroup, ...]:
    """Group sub-caches by stride and retention."""
    names = [sub_cache.name for sub_cache in sub_caches]
    assert len(set(names)) == len(names), f"sub-cache names repeat: {names}"
    members: dict[tuple[int, int], list[SubCache]] = {}
    for sub_cache in sub_caches:
        members.setdefault((sub_cache.stride_tokens, sub_cache.keep_tokens), []).append(sub_cache)
    return tuple(
        CacheGroup(group[0].name, tuple(group), stride_tokens, keep_tokens)
        for (stride_tokens, keep_tokens), group in members.items()
    )
