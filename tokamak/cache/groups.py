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
    late_tokens: int = 0

    @property
    def bounded(self) -> bool:
        """Whether late rows of a cut prompt are near to what they stand for, and depend on where the prompt ends."""
        return 0 < self.late_tokens <= self.keep_tokens


STEPS_UNDER_WAY = 3
"""Steps whose tokens may be planned and not committed: the loop is one ahead, and one is being planned."""


def group_sub_caches(sub_caches: Sequence[SubCache]) -> tuple[CacheGroup, ...]:
    """Group sub-caches by stride, retention and how much of a prompt is written."""
    names = [sub_cache.name for sub_cache in sub_caches]
    assert len(set(names)) == len(names), f"sub-cache names repeat: {names}"
    members: dict[tuple[int, int, int], list[SubCache]] = {}
    for sub_cache in sub_caches:
        alike = (sub_cache.stride_tokens, sub_cache.keep_tokens, sub_cache.late_tokens)
        members.setdefault(alike, []).append(sub_cache)
    return tuple(
        CacheGroup(group[0].name, tuple(group), *alike) for alike, group in members.items()
    )


def first_late(prompt_tokens: int, late_tokens: int) -> int:
    """The first position of a prompt whose rows are written, where those of its newest tokens alone are."""
    return max(0, prompt_tokens - late_tokens) if late_tokens else 0


def grows_by_chunk(groups: Sequence[CacheGroup]) -> tuple[bool, ...]:
    """By group: whether a request takes blocks as its chunks come, and not for its whole prompt at once.

    That is where a group keeps the newest tokens alone, beside one that keeps all and says how many requests fit.
    """
    keeps_all = any(group.keep_tokens == 0 for group in groups)
    return tuple(keeps_all and group.keep_tokens > 0 for group in groups)


def window_blocks(
    keep_tokens: int, *, block_tokens: int, longest_tokens: int, requests: int, step_tokens: int
) -> int:
    """Blocks that a group which keeps the newest tokens can never run out of, the null block included.

    Each of `requests` holds what its next token reads, up to a block more on either side and one that is let go of
    late; beside that come the tokens of steps under way, at most `step_tokens` each.
    """
    kept = -(-keep_tokens // block_tokens) + 4
    under_way = STEPS_UNDER_WAY * -(-step_tokens // block_tokens)
    whole = -(-longest_tokens // block_tokens)
    return 1 + min(requests * whole, requests * kept + under_way)
