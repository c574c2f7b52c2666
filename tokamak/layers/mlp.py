"""The gated feed-forward part of a decoder layer (SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.ops.activation import silu_mul


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, build: Build, width: int, inner_width: int, *, bias: bool = False) -> None:
        self.gate_up = Linear(build, width, (inner_width, inner_width), bias=bias)
        self.down = Linear(build, inner_width, (width,), bias=bias)
        self._silu_mul = build.bind(silu_mul)

    def feed(self, x: Tensor) -> Tensor:
        """Rows that are normed already, through and back; x: [rows, width], returns the same shape and dtype."""
        return self.down(self._silu_mul(self.gate_up(x)))

    def __call__(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor | None:
        """Feed the normed residual stream through, and add the result to it or return it pending.

        x: [rows, width] pending from the part before, or None; residual: [rows, width]. Returns the same.
        """
        fused = self.gate_up.fused
        if fused is None:
            inner = self._silu_mul(self.gate_up.after_norm(x, residual, norm))
        else:
            inner = fused.gated_after_norm(x, residual, norm.weight.values, norm.eps)
        return self.down.into(inner, residual)
