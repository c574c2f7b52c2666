"""Rows to E4M3 in plain PyTorch: a scale per row and group of columns, as products of 8 bits take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op

LARGEST = 448.0
"""The largest number of E4M3."""
LEAST = 1e-4
"""Groups of smaller numbers get the scale of this one."""


@op
def quantize_rows(x: Tensor, group: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Round each row to E4M3 (float8_e4m3fn), groups of `group` columns by a scale of their own.

    A scale is the group's largest magnitude, at least LEAST, over 448; with `power_of_two` it is rounded up to a
    power of two, as DeepSeek's checkpoints of UE8M0 scales were trained with. Numbers are divided by it, cut to
    448 and rounded to the nearest, ties to even.

    x: [rows, columns] of floats. Returns codes [rows, columns], and scales [rows, columns / group], rounded up, float32:
    x is about code * scale.
    """
    rows, columns = x.shape
    groups = -(-columns // group)
    wide = functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    scales = wide.abs().amax(-1).clamp_min(LEAST) * (1.0 / LARGEST)
    if power_of_two:
        scales = rounded_up(scales)
    codes = (wide / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(rows, groups * group)[:, :columns].contiguous(), scales


def rounded_up(scales: Tensor) -> Tensor:
    """Positive normal float32 numbers, each rounded up to a power of two."""
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
