"""Grouped-query attention over a paged cache: project, norm, rotate, cache, attend, project.

All of it can be recorded at the height of a bucket but the attending: rows of a step with prefill attend over
what the live context says, in an eager region. In a step of decode rows alone the region takes them as they were
projected, where the device has a kernel that rotates, caches and attends at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.core.context import StepContext, current
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import eager_region
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.layers.rows import cut, hand_back
from tokamak.layers.vector import Vector
from tokamak.ops.paged_attention import paged_attention
from tokamak.ops.rope import rotate_and_cache
from tokamak.ops.rotate_cache_attend import rotate_cache_attend

GROUP = "keys"
"""The cache group that `keys` and `values` form, named after its first sub-cache."""

CACHE_DTYPES = ("bfloat16", "fp8")
"""Formats its keys and values may have beside the model's own."""


@eager_region("gqa_attention", outs=("out",))
def gqa_attention(rows: Tensor, out: Tensor, layer: int) -> None:
    """Attend with the layer of that number in the installed context.

    rows: rotated queries [tokens, heads, head_dim]; or decode rows as they were projected, [tokens,
    (heads + 2 * kv_heads) * head_dim]. out: [tokens, heads, head_dim].
    """
    context = current()
    attention = context.layers[layer]
    assert isinstance(attention, GroupedQueryAttention), f"layer {layer} is {attention!r}"
    if rows.dim() == out.dim():
        attention.attend(rows, out, context)
    else:
        attention.decode(rows, out, context)


class GroupedQueryAttention:
    """`heads` query heads share `kv_heads` key and value heads; `window_tokens` 0 sees everything.

    `cos_sin` is the model's one table of angles ([positions, rotary_dim] float32). With `head_norms`,
    queries and keys are normed per head before rotation. With `sinks`, each query head has a learned score beside
    those of its keys.
    """

    q_norm: Vector | None
    k_norm: Vector | None
    """[head_dim] weights of the head norms, parameters of their own."""
    sinks: Vector | None
    """[heads] float32, a parameter of its own."""

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        cos_sin: Tensor,
        eps: float,
        window_tokens: int = 0,
        head_norms: bool = False,
        sinks: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = Linear(build, width, rows, bias=qkv_bias)
        self.out = Linear(build, heads * head_dim, (width,), bias=out_bias)
        self.q_norm = Vector(build, (head_dim,), around=1.0) if head_norms else None
        self.k_norm = Vector(build, (head_dim,), around=1.0) if head_norms else None
        self.sinks = Vector(build, (heads,), dtype=torch.float32) if sinks else None
        self._heads, self._head_dim = heads, head_dim
        self._cos_sin = cos_sin
        self._eps = eps
        self._scale = head_dim**-0.5
        self._window_tokens = window_tokens
        self._rotate_and_cache = build.bind(rotate_and_cache)
        self._paged_attention = build.bind(paged_attention, live=True)
        self._rotate_cache_attend = build.bind_joined(
            rotate_cache_attend, (rotate_and_cache, paged_attention), live=True
        )
        self._number = build.enroll(self)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def bind_caches(self, keys: Tensor, values: Tensor) -> None:
        """Take this layer's views, each [blocks, kv_heads, block_tokens, head_dim], in the build's cache_dtype."""
        self._keys, self._values = keys, values

    def __call__(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, step: StepInputs
    ) -> Tensor | None:
        """Attend from the normed residual stream, and add the result to it or return it pending.

        x: [tokens, width] pending from the part before, or None; residual: [tokens, width]. Returns the same.
        Writes this step's keys and values.
        """
        keys, values = self._keys, self._values
        assert keys is not None, "attention was called before its caches were bound"
        assert values is not None, "attention was called before its caches were bound"
        rows = self.qkv.after_norm(x, residual, norm)
        if not step.q_width or self._rotate_cache_attend is None:
            rows = self._rotate_and_cache(
                rows,
                step.positions,
                self._cos_sin,
                keys,
                values,
                step.rows[GROUP].write_slots,
                *self._norms,
                self._eps,
            )
        out = rows.new_empty((rows.shape[0], self._heads, self._head_dim))
        gqa_attention(rows, out, self._number)
        return self.out.into(out.view(-1, self._heads * self._head_dim), residual)

    @property
    def _norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the head norms."""
        return (
            None if self.q_norm is None else self.q_norm.values,
            None if self.k_norm is None else self.k_norm.values,
        )

    @property
    def _sinks(self) -> Tensor | None:
        """Scores of the sinks."""
        return None if self.sinks is None else self.sinks.values

    def attend(self, q: Tensor, out: Tensor, context: StepContext) -> None:
        """The body of the region: one call for prefill rows, one for decode rows, padding filled.

        q, out: [tokens, heads, head_dim].
        """
        keys, values, rows = self._keys, self._values, context.inputs.rows[GROUP]
        assert keys is not None, "attention was called before its caches were bound"
        assert values is not None, "attention was called before its caches were bound"
        for half in context.attn.halves:
            queries, mixed = cut(half, q, out)
            blocks = -(-half.longest_tokens // rows.block_tokens)
            self._paged_attention(
                queries,
                keys,
                values,
                rows.block_table[half.requests, :blocks],
                rows.lengths[half.requests],
                half.query_starts,
                half.q_width,
                self._scale,
                self._window_tokens,
                mixed,
                self._sinks,
            )
        hand_back(context, out)

    def decode(self, qkv: Tensor, out: Tensor, context: StepContext) -> None:
        """The body of the region for decode rows as they were projected: rotate, cache and attend in one call.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]. out: [tokens, heads, head_dim].
        """
        keys, values, rows = self._keys, self._values, context.inputs.rows[GROUP]
        assert keys is not None, "attention was called before its caches were bound"
        assert values is not None, "attention was called before its caches were bound"
        attn, half, attend = context.attn, context.attn.decode, self._rotate_cache_attend
        assert attn.prefill is None, "prefill rows came unrotated"
        assert half is not None, "a step without rows attends"
        assert attend is not None, "rows came unrotated, and nothing is bound that rotates them"
        projected, mixed, positions, slots = cut(
            half, qkv, out, context.inputs.positions, rows.write_slots
        )
        blocks = -(-half.longest_tokens // rows.block_tokens)
        attend(
            projected,
            positions,
            self._cos_sin,
            keys,
            values,
            slots,
            *self._norms,
            self._eps,
            rows.block_table[half.requests, :blocks],
            rows.lengths[half.requests],
            half.query_starts,
            half.q_width,
            self._scale,
            self._window_tokens,
            mixed,
            self._sinks,
        )
        hand_back(context, out)
