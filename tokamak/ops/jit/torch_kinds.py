"""Which tensors do kernels take and fill? Formats by dtype, rows without gaps, new tensors."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Memory formats kernels are compiled for, by tensor dtype."""


def rows_of(x: Tensor) -> Tensor:
    """The matrix itself where each row lies in one piece, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor for a kernel to fill."""
    return torch.empty(shape, dtype=dtype)
