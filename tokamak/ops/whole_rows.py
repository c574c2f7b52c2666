"""Why do equal rows of PyTorch's functions differ in the last bit? Its loops over vectors end in a scalar rest.

Which numbers are the rest depends on how many rows there are. With a whole number of vectors there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
"""Divisible by the longest step of such a loop."""


def whole_rows(x: Tensor) -> Tensor:
    """X [rows, ...] with rows of zeros behind it, up to a multiple of ROWS."""
    missing = -x.shape[0] % ROWS
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x
