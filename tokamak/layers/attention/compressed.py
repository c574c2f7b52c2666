"""Compressed entries of a layer: groups of tokens folded into one row, and what is cached of them.

Everything is cached by position, a group that is still open too: a chunk or a decode step goes on where the last one
ended, and where a prefix of another request ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tokamak.core.context import StepContext, current
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import eager_region
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.layers.plain import Plain
from tokamak.layers.rows import cut, hand_back
from tokamak.ops.compress import fold_groups, write_rows
from tokamak.ops.norm import rms_norm
from tokamak.ops.records import KVFormat, write_records
from tokamak.ops.rope import rotate_pairs
from tokamak.ops.rotate_write import ROUNDED_AS, Rounded, rotate_write


@eager_region("fold_groups", outs=("out",))
def fold_groups_region(out: Tensor, layer: int) -> None:
    """Fold the groups that end in this step, with the compressor of that number. out: [tokens, width]."""
    context = current()
    compressor = context.layers[layer]
    assert isinstance(compressor, Compressor), f"layer {layer} is {compressor!r}"
    compressor.fold(out, context)


class CacheRows:
    """One layer's rows in a cache group: where they are, and how a step writes them.

    form: the format of records they are kept in, None where they are numbers.
    """

    def __init__(
        self, build: Build, group: str, ratio: int = 1, form: KVFormat | None = None
    ) -> None:
        self.group, self.ratio, self.form = group, ratio, form
        if form is None:
            self._write = build.bind(write_rows)
        else:
            self._write = partial(build.bind(write_records), form=form)
        self._cache: Tensor | None = None

    def bind(self, cache: Tensor) -> None:
        """Take the view, [blocks, 1, block_rows, width], or the bytes of records for a width."""
        self._cache = cache

    @property
    def cache(self) -> Tensor:
        """The view, [blocks, 1, block_rows, width]."""
        assert self._cache is not None, "a cache was used before it was bound"
        return self._cache

    def write(self, rows: Tensor, step: StepInputs) -> None:
        """Cache rows [tokens, width] at their positions; with a ratio, those of tokens that end a group."""
        slots = step.rows[self.group].write_slots
        self._write(self.cache, rows, slots, step.positions, self.ratio)

    def table(self, context: StepContext, requests: slice, longest_tokens: int) -> Tensor:
        """The block table of some requests, as wide as their longest needs. int32 [requests, blocks]."""
        rows = context.inputs.rows[self.group]
        blocks = -(-longest_tokens // rows.block_tokens)
        return rows.block_table[requests, :blocks]


class Compressor:
    """Rows of the residual stream to latents, one for each group of `ratio` tokens, normed and not rotated.

    With a ratio of 1 every token is its group. With `overlapped`, a group is mixed with the one before it.
    """

    values: Linear
    """The values of one token alone where the ratio is 1, else its values and then its gates."""
    bias: Plain | None
    """[ratio, columns] float32, added to gates by place in the group."""
    state: CacheRows | None
    """Where values and gates of tokens are kept, float32; None where the ratio is 1."""

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        latent: int,
        ratio: int,
        eps: float,
        state: CacheRows | None = None,
        overlapped: bool = False,
        has_bias: bool = False,
    ) -> None:
        self.ratio = ratio
        columns = 2 * latent if overlapped else latent
        self.norm = RMSNorm(build, latent, eps)
        self.bias = Plain(build, (ratio, columns)) if has_bias else None
        self.state = state
        if state is None:
            self.values = Linear(build, width, (columns,))
        else:
            self.values = Linear(build.widened(), width, (columns, columns))
        self._latent, self._overlapped = latent, overlapped
        self._fold = build.bind(fold_groups, live=True)
        self._number = build.enroll(self)

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """x: [tokens, width]; returns [tokens, latent], of meaning in rows of tokens that end a group."""
        if self.state is None:
            return self.norm(self.values(x))
        rows = self.values.wide(x)
        self.state.write(rows, step)
        folded = torch.empty((x.shape[0], self._latent), dtype=x.dtype, device=x.device)
        fold_groups_region(folded, self._number)
        return self.norm(folded)

    def fold(self, out: Tensor, context: StepContext) -> None:
        """The body of the region. out: [tokens, latent]."""
        assert self.state is not None, "a compressor of single tokens folds nothing"
        for half in context.attn.halves:
            positions, folded = cut(half, context.inputs.positions, out)
            self._fold(
                self.state.cache,
                self.state.table(context, half.requests, half.longest_tokens),
                positions,
                half.query_starts,
                half.q_width,
                self.ratio,
                self._overlapped,
                None if self.bias is None else self.bias.values,
                folded,
            )
        hand_back(context, out)


class Rotation:
    """Turns the end of heads by position, by one table of angles, [positions, rotary_dim] float32."""

    def __init__(self, build: Build, cos_sin: Tensor) -> None:
        self.cos_sin = cos_sin
        self._rotate = build.bind(rotate_pairs)

    def __call__(self, x: Tensor, positions: Tensor, *, ratio: int = 1) -> Tensor:
        """x: [tokens, heads, head_dim] or [tokens, head_dim]; positions: int32 [tokens]; returns a new tensor.

        Rows of a group of `ratio` positions turn as its first would.
        """
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        return self._rotate(heads, positions, self.cos_sin, False, ratio).view(x.shape)


class TurnedRows:
    """What a layer caches of rows: normed if there is a norm, turned by position, rounded; in one kernel where there is one."""

    def __init__(
        self,
        build: Build,
        kept: CacheRows,
        rotation: Rotation,
        *,
        norm: RMSNorm | None = None,
        rounded: Rounded = "",
    ) -> None:
        self._kept, self._rotation, self._norm = kept, rotation, norm
        self._rounded: Rounded = rounded
        self._round = rounding(build, rounded)
        self._rotate_write = None
        if kept.form is None:
            self._rotate_write = build.bind_joined(
                rotate_write, (rms_norm, rotate_pairs, write_rows, *ROUNDED_AS.values())
            )

    def write(self, rows: Tensor, step: StepInputs) -> None:
        """Cache rows [tokens, width] at their positions; with a ratio, those of tokens that end a group."""
        kept, norm, positions = self._kept, self._norm, step.positions
        if self._rotate_write is not None:
            self._rotate_write(
                kept.cache,
                rows,
                None if norm is None else norm.weight.values,
                0.0 if norm is None else norm.eps,
                step.rows[kept.group].write_slots,
                positions,
                self._rotation.cos_sin,
                kept.ratio,
                self._rounded,
            )
            return
        rows = rows if norm is None else norm(rows)
        kept.write(self._round(self._rotation(rows, positions, ratio=kept.ratio)), step)


def rounding(build: Build, rounded: Rounded) -> Callable[[Tensor], Tensor]:
    """The round trip through a narrow format; what it is given where there is none."""
    return build.bind(ROUNDED_AS[rounded]) if rounded else _as_is


def _as_is(x: Tensor) -> Tensor:
    return x
