# pyright: reportArgumentType=false, reportCallIssue=false
"""Token ids to their vectors in Triton: one program per tile of a row, a copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.embedding.reference import embed
from tokamak.ops.triton_facts import fits, rows_of

TILE = 1024
WARPS = 4


@triton.jit
def _embed_kernel(
    token_ids_ptr, table_ptr, out_ptr, width, stride_token_id, stride_table_row, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < width
    token_id = tl.load(token_ids_ptr + row * stride_token_id).to(tl.int64)
    vector = tl.load(table_ptr + token_id * stride_table_row + cols, mask=inside)
    tl.store(out_ptr + row * width + cols, vector, mask=inside)


@embed.backend("triton", fits=fits)
def triton_embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Copy the rows of a table that token ids name."""
    table = rows_of(table)
    tokens, width = token_ids.shape[0], table.shape[1]
    out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    _embed_kernel[(tokens, triton.cdiv(width, TILE))](
        token_ids, table, out, width, token_ids.stride(0), table.stride(0),
        TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return out
