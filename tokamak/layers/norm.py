"""RMS norm with its weight, alone or together with the residual add before it."""

from __future__ import annotations

from torch import Tensor

from tokamak.layers.build import Build
from tokamak.layers.vector import Vector
from tokamak.ops.norm import add_rms_norm, rms_norm


class RMSNorm:
    """Scales rows to unit root mean square, then by `weight`, a parameter of its own."""

    def __init__(self, build: Build, width: int, eps: float) -> None:
        self.weight = Vector(build, (width,), around=1.0)
        self.eps = eps
        self._rms_norm = build.bind(rms_norm)
        self._add_rms_norm = build.bind(add_rms_norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [rows, width]; returns the same shape and dtype."""
        return self._rms_norm(x, self.weight.values, self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add x, if anything is pending, to the residual stream in place and norm it; all [rows, width]."""
        if x is None:
            return self(residual)
        return self._add_rms_norm(x, residual, self.weight.values, self.eps)
