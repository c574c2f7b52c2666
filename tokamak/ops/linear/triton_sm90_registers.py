# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Products of 2 to 32 rows on Hopper's tensor cores, whose operands come from memory straight into registers.

One program multiplies a tile of features; every warp takes columns of its own. A lane's share of an operand
of the tensor cores is 8 numbers in a row, the 16 bytes it loads at a time: columns are summed, so that any
order of them will do as long as weights and rows have the same. Nothing passes through shared memory and no
warp waits for another before the end, and the first weights are on their way before anything is known of a row.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tokamak.ops.linear.tile import Tile, row_class

LEAST_ROWS = 8
"""Rows that tensor cores multiply at least."""
K_WIDTH = gl.constexpr(8)


@gluon.jit
def _registers_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    rows,
    features,
    stride_x_row,
    stride_out_row,
    eps,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    TILE_FEATURES: gl.constexpr,
    TILE_COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    NORM: gl.constexpr,
    GATED: gl.constexpr,
    INTO: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Tiles divide the weight: features by TILE_FEATURES, COLUMNS by WARPS * TILE_COLUMNS."""
    if OVERLAPS:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, K_WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, K_WIDTH)
    warp_left = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    near_left = gl.arange(0, TILE_FEATURES, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    cols_left = gl.arange(0, TILE_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    warp_right = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    cols_right = gl.arange(0, TILE_COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    row_right = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    first = gl.program_id(0) * TILE_FEATURES
    tile_ptr = weight_ptr + first.to(gl.int64) * COLUMNS
    offsets = warp_left[:, None, None] * TILE_COLUMNS + cols_left[None, None, :]
    offsets = offsets + near_left[None, :, None] * COLUMNS
    up_ptr = tile_ptr + features.to(gl.int64) * COLUMNS
    place = warp_right[:, None, None] * TILE_COLUMNS + cols_right[None, :, None]
    here = row_right[None, None, :] < rows
    rows_offsets = place + row_right[None, None, :] * stride_x_row
    total = gl.zeros([WARPS, TILE_FEATURES, ROWS], gl.float32, layout=sums)
    up_total = gl.zeros([WARPS, TILE_FEATURES, ROWS], gl.float32, layout=sums)
    squares = gl.zeros([WARPS, TILE_COLUMNS, ROWS], gl.float32, layout=right)
    for begin in gl.static_range(0, COLUMNS, WARPS * TILE_COLUMNS):
        weight = gl.load(tile_ptr + begin + offsets)
        up_weight = weight
        if GATED:
            up_weight = gl.load(up_ptr + begin + offsets)
        if OVERLAPS and begin == 0:
            gl.inline_asm_elementwise(
                "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
        x = gl.load(x_ptr + begin + rows_offsets, mask=here, other=0.0)
        if NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            norm_weight = gl.load(norm_weight_ptr + begin + place)
            x = (wide * norm_weight.to(gl.float32)).to(x.dtype)
        total = mma_v2(weight, x, total)
        if GATED:
            up_total = mma_v2(up_weight, x, up_total)
    out = gl.sum(total, axis=0)
    up = gl.sum(up_total, axis=0)
    if NORM:
        mean = gl.sum(gl.sum(squares, axis=1), axis=0) / COLUMNS
        mean = gl.convert_layout(mean, gl.SliceLayout(0, out.type.layout))
        scale = gl.rsqrt(mean + eps)[None, :]
        out, up = out * scale, up * scale
    if GATED:
        out = out / (1.0 + gl.exp(-out)) * up
    flat: gl.constexpr = out.type.layout
    feature = first + gl.arange(0, TILE_FEATURES, layout=gl.SliceLayout(1, flat))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))
    place_ptr = out_ptr + row[None, :].to(gl.int64) * stride_out_row + feature[:, None]
    mask = (row < rows)[None, :] & (feature < features)[:, None]
    if INTO:
        out += gl.load(place_ptr, mask=mask, other=0.0).to(gl.float32)
    gl.store(place_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


def multiply_in_registers(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    into: bool,
    tile: Tile,
) -> None:
    """Launch the kernel for 2 to 32 rows; `tile` divides the weight, other arguments are those of `multiply`."""
    rows, columns = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    _registers_kernel[(features // tile.features,)](
        x, weight, x if norm_weight is None else norm_weight, out,
        rows, features, x.stride(0), out.stride(0), eps,
        COLUMNS=columns, ROWS=max(row_class(rows), LEAST_ROWS),
        TILE_FEATURES=tile.features, TILE_COLUMNS=tile.columns, WARPS=tile.warps,
        NORM=norm_weight is not None, GATED=gated, INTO=into, OVERLAPS=tile.overlaps,
        num_warps=tile.warps, launch_pdl=tile.overlaps,
    )  # fmt: skip
