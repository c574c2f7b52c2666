"""Rows to E4M3 in plain PyTorch: a scale per row and group of columns, as products of 8 bits take them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.core.minifloat import E4M3_MOST, float_of_ue8m0
from tokamak.ops.quantize.blocks import FP8_LEAST, e4m3_of, fp8_scales
from tokamak.ops.registry import op


@op
def quantize_rows(x: Tensor, group: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Round each row to E4M3 (float8_e4m3fn), groups of `group` columns by a scale of their own.

    A scale is the group's largest magnitude, at least FP8_LEAST, over 448; with `power_of_two` it is rounded up to a
    power of two, as DeepSeek's checkpoints of UE8M0 scales were trained with. Numbers are divided by it, cut to
    448 and rounded to the nearest, ties to even.

    x: [rows, columns] of floats. Returns codes [rows, columns], and scales [rows, columns / group], rounded up, float32:
    x is about code * scale.
    """
    rows, columns = x.shape
    groups = -(-columns // group)
    wide = functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    largest = wide.abs().amax(-1)
    if power_of_two:
        scales = float_of_ue8m0(fp8_scales(largest))
    else:
        scales = largest.clamp_min(FP8_LEAST) * (1 / E4M3_MOST)
    codes = e4m3_of(wide / scales.unsqueeze(-1))
    return codes.view(rows, groups * group)[:, :columns].contiguous(), scales
