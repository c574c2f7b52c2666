"""Gated activations in plain PyTorch (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op


@op
def silu_mul(gate_up: Tensor) -> Tensor:
    """Multiply silu(gate) with up.

    gate_up: [rows, 2 * width], gate first; returns [rows, width] in the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
