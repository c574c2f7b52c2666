"""Experts of DeepSeek V4 and V4.1: routed by sqrt(softplus), gated with limits, and one expert all rows share."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.layers.beside import Beside
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.moe import StackedExperts, in_8_bits
from tokamak.layers.plain import Plain
from tokamak.ops.activation import silu_mul_limited
from tokamak.ops.moe_experts import (
    moe_experts_limited,
    packed_experts_limited,
    scaled_experts_limited,
)
from tokamak.ops.moe_route import moe_route_rooted, moe_weigh_rooted
from tokamak.ops.quantize.blocks import FP8_BLOCK


class RootedExperts:
    """Each row through `chosen` of `experts` and a shared one.

    `bias` ranks experts along with the router. Where `vocab_tokens` is given, a table says for each token id who is
    chosen, and the router only weighs. rounded: columns of a row that share a power of two where rows are rounded to
    8 bits, which experts of 4 bits are made for. The shared expert speaks beside the others where rows are few.
    """

    bias: Plain | None
    table: Plain | None

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        inner_width: int,
        experts: int,
        chosen: int,
        scale: float,
        limit: float,
        rounded: int = FP8_BLOCK,
        vocab_tokens: int = 0,
    ) -> None:
        inner = (inner_width, inner_width)
        self.router = Linear(build.widened(), width, (experts,))
        self.bias = None if vocab_tokens else Plain(build, (experts,))
        self.table = None
        if vocab_tokens:
            self.table = Plain(
                build,
                (vocab_tokens, chosen),
                dtype=torch.int32,
                draw=lambda shape, generator: torch.randint(experts, shape, generator=generator),
            )
        whole = width % rounded == 0 and inner_width % rounded == 0
        stack = partial(
            StackedExperts,
            build,
            experts,
            chosen=chosen,
            scaled_op=scaled_experts_limited,
            packed_op=packed_experts_limited if whole else None,
        )
        self.gate_up, self.down = stack(width, inner), stack(inner_width, (width,))
        self.shared_gate_up = Linear(build, width, inner)
        self.shared_down = Linear(build, inner_width, (width,))
        self._beside = Beside("shared expert")
        self._chosen, self._scale, self._limit, self._rounded = chosen, scale, limit, rounded
        self._route = build.bind(moe_route_rooted)
        self._weigh = build.bind(moe_weigh_rooted)
        self._experts = build.bind(moe_experts_limited)
        self._scaled_experts = build.bind(scaled_experts_limited)
        self._packed_experts = build.bind(packed_experts_limited)
        self._silu_mul = build.bind(silu_mul_limited)

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the chosen say and what the shared one says, to be added: both [tokens, width].

        x: [tokens, width], normed; token_ids: [tokens] int32.
        """
        with self._beside.fork(x.shape[0]):
            shared = self.shared_down(self._silu_mul(self.shared_gate_up(x), self._limit))
        routed = self._routed(x, *self._choose(x, token_ids))
        self._beside.join(x.shape[0])
        return routed, shared

    def _choose(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Who is chosen for each row, int32, and with what weight, float32: both [tokens, chosen]."""
        scores = self.router.wide(x)
        if self.table is None:
            assert self.bias is not None, "experts without a table have a bias"
            return self._route(scores, self.bias.values, self._chosen, self._scale)
        ids = self.table.values.index_select(0, token_ids)
        return ids, self._weigh(scores, ids, self._scale)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the chosen experts say, in the number format that both their matrices have."""
        up, down = self.gate_up.packed, self.down.packed
        if up is not None and down is not None:
            return self._packed_experts(x, ids, weights, *up, *down, self._rounded, self._limit)
        stored = in_8_bits(self.gate_up, self.down)
        if stored is not None:
            return self._scaled_experts(x, ids, weights, *stored, self._limit)
        self.gate_up.widen()
        self.down.widen()
        return self._experts(x, ids, weights, self.gate_up.values, self.down.values, self._limit)
