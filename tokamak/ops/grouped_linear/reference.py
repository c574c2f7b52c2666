"""A block-diagonal product in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y_g = x_g W_g^T for each group.

    x: [tokens, groups, width], any strides of the first two; weight: [groups, rows, width], contiguous, in the dtype of
    x. Returns [tokens, groups * rows] in that dtype, group by group.
    """
    tokens, (groups, rows, _) = x.shape[0], weight.shape
    out = torch.empty((tokens, groups, rows), dtype=x.dtype, device=x.device)
    # Products are written where they belong: no tensor is put together afterwards.
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, groups * rows)
