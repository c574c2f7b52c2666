"""Which sizes graphs are recorded at, and the only search for the bucket of a size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from tokamak.errors import OptionError

SMALLEST_TOKEN_BUCKET = 64
LARGEST_TOKEN_BUCKET = 2048


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sorted, distinct bucket sizes."""

    buckets: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Iterable[int], *, limit: int, option: str) -> Ladder:
        """An explicit list; empty switches the graph off.

        Raises:
            OptionError: a size is not positive, or larger than any step can be.
        """
        buckets = tuple(sorted(set(sizes)))
        for size in buckets:
            if not 1 <= size <= limit:
                raise OptionError(
                    f"{option} holds {size}; a step has 1 to {limit} of them",
                    hint=f"leave {size} out or raise the limit",
                )
        return cls(buckets)

    @classmethod
    def requests(cls, *, max_num_seqs: int, q_width: int, max_num_batched_tokens: int) -> Ladder:
        """The default request ladder: 1, 2, 4, by 8 to 64, by 16 to 256, by 32 above (SH-11)."""
        steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32))
        limit = min(max_num_seqs, max_num_batched_tokens // q_width)
        return cls(tuple(sorted({size for size in (*steps, max_num_seqs) if size <= limit})))

    @classmethod
    def tokens(cls, *, max_num_batched_tokens: int) -> Ladder:
        """The default token ladder: from 64, each step a quarter of the size rounded down to 2^k (SH-12)."""
        end = min(LARGEST_TOKEN_BUCKET, max_num_batched_tokens)
        sizes: list[int] = []
        size = SMALLEST_TOKEN_BUCKET
        while size < end:
            sizes.append(size)
            size += max(SMALLEST_TOKEN_BUCKET, 1 << ((size // 4).bit_length() - 1))
        return cls((*sizes, end))

    def ceil(self, size: int) -> int | None:
        """The smallest bucket that holds `size`, or None above the ladder."""
        at = bisect_left(self.buckets, size)
        return self.buckets[at] if at < len(self.buckets) else None
