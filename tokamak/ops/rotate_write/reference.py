"""What DeepSeek V4 and V4.1 do with a row before it is cached, in plain PyTorch: the ops it is made of, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from tokamak.ops.compress.reference import write_rows
from tokamak.ops.norm.reference import rms_norm
from tokamak.ops.quantize.reference import fake_fp8, fake_mxfp4, fake_nvfp4
from tokamak.ops.registry import Op, op
from tokamak.ops.rope.pairs import rotate_pairs

Rounded = Literal["", "fp8", "mxfp4", "nvfp4"]
"""The narrow format that rows go through, or none."""

ROUNDED_AS: Mapping[str, Op[..., Tensor]] = {
    "fp8": fake_fp8,
    "mxfp4": fake_mxfp4,
    "nvfp4": fake_nvfp4,
}
"""The round trips by name."""


@op
def rotate_write(
    cache: Tensor,
    rows: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    ratio: int,
    rounded: Rounded,
) -> None:
    """Norm rows, if there is a weight, turn them by position, round them, and write them as `write_rows` does.

    cache: [blocks, 1, block_rows, width], changed. rows: [tokens, width]. norm_weight: [width], in the dtype of rows, or None.
    slots: [tokens] int64. positions: [tokens] int32. cos_sin: [positions, rotary_dim] float32, see `rotate_pairs`.
    What each of the parts returns is in the dtype of rows.
    """
    if norm_weight is not None:
        rows = rms_norm.reference(rows, norm_weight, eps)
    rows = rotate_pairs.reference(rows.unsqueeze(1), positions, cos_sin, False, ratio).squeeze(1)
    if rounded:
        rows = ROUNDED_AS[rounded].reference(rows)
    write_rows.reference(cache, rows, slots, positions, ratio)
