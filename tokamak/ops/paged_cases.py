"""Paged rows for cases: requests with blocks in no order, prompt chunks or decode rows, NaN where nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = 48


@dataclass(frozen=True, slots=True)
class Requests:
    """Which rows a step has: prompt chunks as (queries, tokens before), or decode rows as tokens with this step's."""

    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()
    q_width: int = 1
    block_tokens: int = 16

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request with this step's."""
        return [queries + before for queries, before in self.prefill] + list(self.decode)

    @property
    def queries(self) -> list[int]:
        """Rows of each request."""
        return [queries for queries, _ in self.prefill] + [self.q_width] * len(self.decode)

    @property
    def width(self) -> int:
        """What ops get as `q_width`."""
        return self.q_width if self.decode else 0

    def positions(self) -> Tensor:
        """Of every row, int32 [tokens]."""
        rows = [
            torch.arange(length - queries, length)
            for length, queries in zip(self.lengths, self.queries, strict=True)
        ]
        return torch.cat([torch.empty(0), *rows]).int()

    def starts(self) -> Tensor:
        """Int32 [requests + 1]."""
        return torch.tensor([0, *self.queries]).cumsum(0).int()

    def table(self, generator: torch.Generator) -> Tensor:
        """Blocks of each request from all but the null block, in no order: int32 [requests, blocks]."""
        counts = [-(-length // self.block_tokens) for length in self.lengths]
        free = (torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist()
        table = torch.zeros((len(counts), max(counts, default=0) + 1), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        return table

    def cache(
        self, table: Tensor, width: int, generator: torch.Generator, *, ratio: int = 1
    ) -> Tensor:
        """[blocks, 1, block_rows, width] float32, an entry for every `ratio` tokens; the others are NaN."""
        rows = self.block_tokens // ratio
        cache = torch.full((BLOCKS, 1, rows, width), float("nan"))
        for row, length in enumerate(self.lengths):
            for entry in range(length // ratio):
                block = int(table[row, entry // rows])
                cache[block, 0, entry % rows] = torch.randn(width, generator=generator)
        return cache


STEPS = {
    "a prompt": Requests(prefill=((21, 0),)),
    "chunks": Requests(prefill=((1, 0), (16, 16), (7, 30), (5, 0))),
    "decode": Requests(decode=(1, 2, 3, 16, 17, 40)),
    "decode alone": Requests(decode=(33,)),
    "drafts": Requests(decode=(5, 30, 16), q_width=3),
    "small blocks": Requests(prefill=((9, 4), (3, 0)), block_tokens=8),
    "no rows": Requests(),
}
"""By name."""

LENGTHS = Requests(decode=(1, 127, 128, 129, 255, 256, 257, 1000), block_tokens=64)
"""Decode rows around the edges of tiles and blocks."""
LONG_STEPS = {
    "lengths": LENGTHS,
    "long chunks": Requests(prefill=((130, 0), (3, 997), (2, 126)), block_tokens=64),
}
"""By name; for few cases each, as references gather all their rows."""
