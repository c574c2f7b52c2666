"""Attention over the newest rows and chosen compressed entries: one vector is key and value of all heads.

Projections, norms, rotations and writes to caches are recorded at the height of a bucket. What depends on how long
requests are runs in regions: folding of groups (`compressed.py`), choosing entries, attending.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.context import StepContext, current
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import eager_region
from tokamak.layers.attention.compressed import CacheRows, Rotation, TurnedRows, rounding
from tokamak.layers.attention.scorer import IndexRows, Scorer
from tokamak.layers.build import Build
from tokamak.layers.grouped import GroupedLinear
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.layers.plain import Plain
from tokamak.layers.rows import cut, fill_padding, hand_back
from tokamak.ops.norm import rms_norm
from tokamak.ops.rotate_write import Rounded
from tokamak.ops.sparse_attention import sparse_attention

NONE = -1
"""Stands behind the last entry of a list."""


@eager_region("select_entries", outs=("chosen", "blocks"))
def select_entries_region(
    q: Tensor, weights: Tensor, within: Tensor, chosen: Tensor, blocks: Tensor, layer: int
) -> None:
    """Choose entries with the indexer of that number.

    q: [tokens, heads, dim]; weights: [tokens, heads]. within, blocks: int32 [tokens, candidates], of width 0
    for none; chosen: int32 [tokens, most].
    """
    context = current()
    indexer = context.layers[layer]
    assert isinstance(indexer, Indexer), f"layer {layer} is {indexer!r}"
    indexer.select(q, weights, within, chosen, blocks, context)


@eager_region("sparse_attention", outs=("out",))
def sparse_attention_region(q: Tensor, chosen: Tensor, out: Tensor, layer: int) -> None:
    """Attend with the layer of that number.

    q, out: [tokens, heads, head_dim]. chosen: int32 [tokens, most], of width 0 where a layer has no entries.
    """
    context = current()
    attention = context.layers[layer]
    assert isinstance(attention, SparseAttention), f"layer {layer} is {attention!r}"
    attention.attend(q, chosen, out, context)


@dataclass(frozen=True, slots=True)
class Picked:
    """What layers hand on to each other within a step; -1 stands behind the last of a row."""

    entries: Tensor  # [tokens, most]         int32, entry numbers
    blocks: Tensor  # [tokens, candidates]    int32, numbers of blocks of entries; width 0 for none


def nothing_picked(step: StepInputs) -> Picked:
    """Lists of no width."""
    none = step.positions.new_empty((step.positions.shape[0], 0))
    return Picked(none, none)


class Indexer:
    """Scores a layer's index keys for each row and lists the best entries.

    most: entries a row attends to. block_entries and candidates: with `makes_candidates` it also lists blocks; with
    `keeps_to_candidates` it chooses inside the blocks that were listed before.
    """

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        q_width: int,
        heads: int,
        head_dim: int,
        most: int,
        keys: CacheRows,
        rotation: Rotation,
        rounded_q: Rounded,
        block_entries: int = 1,
        candidates: int = 0,
        makes_candidates: bool = False,
        keeps_to_candidates: bool = False,
    ) -> None:
        self.q_up = Linear(build, q_width, (heads * head_dim,))
        self.head_weights = Linear(build, width, (heads,))
        self._heads, self._head_dim, self._most = heads, head_dim, most
        self._keys, self._rotation, self._round = keys, rotation, rounding(build, rounded_q)
        self._block_entries = block_entries
        self._candidates = candidates if makes_candidates else 0
        self._keeps_to_candidates = keeps_to_candidates
        self._scorer = Scorer(build)
        self._number = build.enroll(self)

    def __call__(self, x: Tensor, latent_q: Tensor, step: StepInputs, before: Picked) -> Picked:
        """x: [tokens, width]; latent_q: [tokens, q_width]; before: what the layer before picked."""
        tokens = x.shape[0]
        q = self.q_up(latent_q).view(tokens, self._heads, self._head_dim)
        q = self._round(self._rotation(q, step.positions))
        # Scores are compared and nothing else: a factor of all of them, as their definition has, changes no list.
        weights = self.head_weights(x)
        within = before.blocks if self._keeps_to_candidates else before.blocks[:, :0]
        chosen = step.positions.new_empty((tokens, self._most))
        blocks = step.positions.new_empty((tokens, self._candidates))
        select_entries_region(q, weights, within, chosen, blocks, self._number)
        return Picked(chosen, blocks if self._candidates else before.blocks)

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        within: Tensor,
        chosen: Tensor,
        blocks: Tensor,
        context: StepContext,
    ) -> None:
        """The body of the region; rows of padding get empty lists."""
        for half in context.attn.halves:
            rows = IndexRows.of_half(half, q, weights, self._keys, context)
            allowed, listed, best = cut(half, within, chosen, blocks)
            self._scorer.score_topk(
                rows,
                listed,
                blocks=best if best.shape[1] else None,
                within=allowed if allowed.shape[1] else None,
                block_entries=self._block_entries,
            )
        fill_padding(context, NONE, chosen, blocks)


class SparseAttention:
    """The attention of one layer. `entries` are the compressed rows it reads, its own or another layer's.

    With `head_norms`, queries are normed per head, without a weight, before rotation.
    """

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        heads: int,
        head_dim: int,
        q_rank: int,
        out_groups: int,
        out_rank: int,
        window_tokens: int,
        window: CacheRows,
        entries: CacheRows | None,
        rotation: Rotation,
        rounded_window: Rounded,
        eps: float,
        head_norms: bool,
    ) -> None:
        self.qkv_down = Linear(build, width, (q_rank, head_dim))
        self.q_norm = RMSNorm(build, q_rank, eps)
        self.q_up = Linear(build, q_rank, (heads * head_dim,))
        self.kv_norm = RMSNorm(build, head_dim, eps)
        self.sink = Plain(build, (heads,))
        self.out_down = GroupedLinear(build, out_groups, heads * head_dim // out_groups, out_rank)
        self.out_up = Linear(build, out_groups * out_rank, (width,))
        self.window, self.entries = window, entries
        self._heads, self._head_dim, self._groups = heads, head_dim, out_groups
        self._window_tokens, self._scale, self._eps = window_tokens, head_dim**-0.5, eps
        self._latents = (q_rank, head_dim)
        self._rotation = rotation
        self._rows = TurnedRows(build, window, rotation, norm=self.kv_norm, rounded=rounded_window)
        self._ones = (
            torch.ones(head_dim, dtype=build.dtype, device=build.device) if head_norms else None
        )
        self._rms_norm = build.bind(rms_norm)
        self._attend = build.bind(sparse_attention, live=True)
        self._number = build.enroll(self)

    def begin(self, x: Tensor, step: StepInputs) -> Tensor:
        """Cache the row of every token of x [tokens, width]; returns what queries are made of, [tokens, q_rank]."""
        latent_q, rows = self.qkv_down(x).split(self._latents, dim=-1)
        self._rows.write(rows, step)
        return self.q_norm(latent_q)

    def __call__(self, latent_q: Tensor, step: StepInputs, entries: Tensor) -> Tensor:
        """Attend; this step's rows are cached. latent_q: [tokens, q_rank]; entries: int32 [tokens, most].

        Returns [tokens, width].
        """
        tokens = latent_q.shape[0]
        q = self.q_up(latent_q).view(-1, self._head_dim)
        if self._ones is not None:
            q = self._rms_norm(q, self._ones, self._eps)
        q = self._rotation(q.view(tokens, self._heads, self._head_dim), step.positions)
        mixed = torch.empty_like(q)
        sparse_attention_region(q, entries, mixed, self._number)
        return self.out_up(self.out_down(mixed.view(tokens, self._groups, -1)))

    def attend(self, q: Tensor, chosen: Tensor, out: Tensor, context: StepContext) -> None:
        """The body of the region."""
        entries, starts = self.entries, context.inputs.window_starts
        for half in context.attn.halves:
            queries, listed, mixed, positions = cut(half, q, chosen, out, context.inputs.positions)
            self._attend(
                queries,
                self.window.cache,
                self.window.table(context, half.requests, half.longest_tokens),
                None if entries is None else entries.cache,
                None
                if entries is None
                else entries.table(context, half.requests, half.longest_tokens),
                None if entries is None else listed,
                positions,
                half.query_starts,
                half.q_width,
                self._window_tokens,
                None if starts is None else starts[half.requests],
                self._scale,
                self.sink.values,
                mixed,
                self.window.form,
                None if entries is None else entries.form,
                self._rotation.cos_sin,
            )
        hand_back(context, out)
