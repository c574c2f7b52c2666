"""The gated feed-forward part of a decoder layer (SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.ops.activation import silu_mul


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, build: Build, width: int, inner_width: int, *, bias: bool = False) -> None:
        self.gate_up = Linear(build, width, (inner_width, inner_width), bias=bias)
        self.down = Linear(build, inner_width, (width,), bias=bias)
        self._silu_mul = build.bind(silu_mul)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, width]; returns the same shape and dtype."""
        return self.down(self._silu_mul(self.gate_up(x)))
