"""Which entries score highest for some query rows? One scorer, for every model that has index keys.

Bands of rows, chunks of keys and plans of walks are the op's and the cache's: a model makes rows and gets lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.inputs import AttnHalf, Rows
from tokamak.layers.attention.compressed import CacheRows
from tokamak.layers.build import Build
from tokamak.layers.rows import cut
from tokamak.ops.indexer import select_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRows:
    """Query rows of one kind of requests, what each may see, and where the keys are.

    A row at position t sees the first (t + 1) // ratio keys of its request: with a ratio of 1, every token's.
    """

    q: Tensor  # [rows, heads, dim]
    weights: Tensor  # [rows, heads]          may be negative
    positions: Tensor  # [rows]                 int32
    query_starts: Tensor  # [requests + 1]         int32, the first row of each request
    q_width: int
    """Rows of every request; 0 where they differ."""
    keys: CacheRows
    block_table: Tensor  # [requests, blocks]     int32, as wide as the longest request needs
    whole: Rows | None
    """The cache group of a step that has these rows alone, each request as many: where their walk is planned."""

    @classmethod
    def of_half(
        cls, half: AttnHalf, q: Tensor, weights: Tensor, keys: CacheRows, context: StepContext
    ) -> IndexRows:
        """The rows of a half. q: [tokens, heads, dim]; weights: [tokens, heads]."""
        alone = bool(half.q_width) and len(context.attn.halves) == 1
        rows, shares, positions = cut(half, q, weights, context.inputs.positions)
        return cls(
            q=rows,
            weights=shares,
            positions=positions,
            query_starts=half.query_starts,
            q_width=half.q_width,
            keys=keys,
            block_table=keys.table(context, half.requests, half.longest_tokens),
            whole=context.inputs.rows[keys.group] if alone else None,
        )


class Scorer:
    """The bound op, and when it goes by a plan."""

    def __init__(self, build: Build) -> None:
        self._select = build.bind(select_entries, live=True)

    def score_topk(
        self,
        rows: IndexRows,
        chosen: Tensor,
        *,
        blocks: Tensor | None = None,
        within: Tensor | None = None,
        block_entries: int = 1,
    ) -> None:
        """List the best entries of every row; what the lists are, the op `select_entries` says.

        chosen: int32 [rows, most], written; blocks: int32 [rows, candidates], written. within: int32 [rows,
        candidates], blocks of `block_entries` entries that nothing outside is listed of.
        """
        self._select(
            rows.q,
            rows.weights,
            rows.keys.cache,
            rows.block_table,
            rows.positions,
            rows.query_starts,
            rows.q_width,
            rows.keys.ratio,
            within,
            block_entries,
            chosen,
            blocks,
            rows.keys.form,
            # Rows that keep to lists of their own share no keys.
            None if within is not None else _plans(rows, chosen, blocks, block_entries),
        )


def _plans(
    rows: IndexRows, chosen: Tensor, blocks: Tensor | None, block_entries: int
) -> Tensor | None:
    """How the keys of a step of decode rows are walked; a row whose lists hold all it sees needs no scores."""
    if rows.whole is None:
        return None
    keep = chosen.shape[1]
    if blocks is not None:
        keep = min(keep, blocks.shape[1] * block_entries)
    return rows.whole.walk_plans(
        rows.positions,
        rows.q_width,
        ratio=rows.keys.ratio,
        keep=keep,
        columns=rows.block_table.shape[1] * rows.keys.cache.shape[2],
    )
