"""Which sizes graphs are recorded at, and the only search for the bucket of a size.

In: the sizes asked for (None is the default rule, an empty list is off) and the limits of a step. Out: a Ladder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from tokamak.errors import OptionError

SMALLEST_TOKEN_BUCKET = 64
LARGEST_TOKEN_BUCKET = 2048


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sorted, distinct bucket sizes; none at all means that the graph is off."""

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
    def requests(
        cls,
        sizes: Iterable[int] | None = None,
        *,
        max_num_seqs: int,
        q_width: int,
        max_num_batched_tokens: int,
    ) -> Ladder:
        """Request buckets: the sizes asked for, or 1, 2, 4, by 8 to 64, by 16 to 256, by 32 above (SH-11).

        Raises:
            OptionError: a bucket is larger than a step of `max_num_seqs` rows of `q_width` tokens can be, or
                not even one row fits.
        """
        if q_width > max_num_batched_tokens:
            raise OptionError(
                f"a decode row has {q_width} tokens and a step at most {max_num_batched_tokens}",
                hint="raise max_num_batched_tokens or draft fewer tokens",
            )
        if sizes is not None:
            ladder = cls.of(sizes, limit=max_num_seqs, option="req_graph_sizes")
            for size in ladder.buckets:
                if size * q_width > max_num_batched_tokens:
                    raise OptionError(
                        f"req_graph_sizes holds {size}: {size} rows of {q_width} tokens are more than "
                        f"max_num_batched_tokens, which is {max_num_batched_tokens}",
                        hint=f"leave {size} out or raise max_num_batched_tokens to {size * q_width}",
                    )
            return ladder
        steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32))
        limit = min(max_num_seqs, max_num_batched_tokens // q_width)
        return cls(tuple(sorted({size for size in (*steps, max_num_seqs) if size <= limit})))

    @classmethod
    def tokens(
        cls,
        sizes: Iterable[int] | None = None,
        *,
        token_max: int = LARGEST_TOKEN_BUCKET,
        max_num_batched_tokens: int,
    ) -> Ladder:
        """Token buckets: the sizes asked for, or from 64 up by a quarter of the size rounded down to 2^k (SH-12).

        The default ends at `token_max` or the largest step, whichever is smaller; an explicit list does not
        read `token_max`.

        Raises:
            OptionError: a bucket is larger than a step can be, or `token_max` is not positive.
        """
        if sizes is not None:
            return cls.of(sizes, limit=max_num_batched_tokens, option="token_graph_sizes")
        if token_max < 1:
            raise OptionError(
                f"token_graph_max is {token_max}; it is the largest token bucket, 1 or more",
                hint="set token_graph_sizes to an empty list to record no token bucket",
            )
        end = min(token_max, max_num_batched_tokens)
        buckets: list[int] = []
        size = SMALLEST_TOKEN_BUCKET
        while size < end:
            buckets.append(size)
            size += max(SMALLEST_TOKEN_BUCKET, 1 << ((size // 4).bit_length() - 1))
        return cls((*buckets, end))

    def up_to(self, most: int) -> Ladder:
        """The buckets below so many, and one that holds as many as the largest, or `most` if that is less."""
        if not self.buckets:
            return self
        end = min(most, self.buckets[-1])
        return Ladder((*[size for size in self.buckets if size < end], end))

    def ceil(self, size: int) -> int | None:
        """The smallest bucket that holds `size`, or None above the ladder."""
        at = bisect_left(self.buckets, size)
        return self.buckets[at] if at < len(self.buckets) else None
