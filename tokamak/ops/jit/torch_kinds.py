"""Which tensors can a kernel take? Formats by dtype, and rows without gaps."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Memory formats kernels are compiled for, by tensor dtype."""


def rows_of(x: Tensor) -> Tensor:
    """The matrix itself where each row lies in one piece, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
