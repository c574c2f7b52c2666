"""Manifold-constrained hyper-connections in plain PyTorch (Xie et al. 2025, arXiv 2512.24880; as in DeepSeek V4).

`S` streams of the residual stream: a layer reads a weighted sum of them and writes to all, while a doubly stochastic
matrix mixes them with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.norm.reference import rms_norm
from tokamak.ops.paged_rows import bands
from tokamak.ops.registry import op
from tokamak.ops.whole_rows import whole_rows


@op
def mix_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """How a layer reads the streams, writes to them, and mixes them.

    streams: [rows, S, width]. fn: [(2 + S) * S, S * width] float32; base: [(2 + S) * S] float32; scale: [3] float32,
    of reading, writing and mixing in turn. iterations: normalisations of columns, the first right behind the softmax
    over rows (Sinkhorn and Knopp 1967); the last is one of columns.
    Returns float32 [rows, S] to read with, [rows, S] to write with, and [rows, S, S], whose first index is the
    stream that is read.
    """
    count = streams.shape[1]
    rows = streams.shape[0]
    mixed = whole_rows(_project(streams, fn, norm_eps))
    read, write, mix = mixed.split([count, count, count * count], dim=-1)
    read_base, write_base, mix_base = base.split([count, count, count * count])
    read = torch.sigmoid(read * scale[0] + read_base) + mix_eps
    write = 2 * torch.sigmoid(write * scale[1] + write_base)
    square = (mix * scale[2] + mix_base).view(-1, count, count).softmax(dim=-1) + mix_eps
    square = square / (square.sum(dim=-2, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        square = square / (square.sum(dim=-1, keepdim=True) + mix_eps)
        square = square / (square.sum(dim=-2, keepdim=True) + mix_eps)
    return read[:rows], write[:rows], square[:rows]


@op
def head_coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, mix_eps: float
) -> Tensor:
    """How a vocabulary head reads the streams.

    streams: [rows, S, width]. fn: [S, S * width], base: [S], scale: [1], all float32. Returns float32 [rows, S].
    """
    mixed = whole_rows(_project(streams, fn, norm_eps))
    return (torch.sigmoid(mixed * scale + base) + mix_eps)[: streams.shape[0]]


@op
def collapse_streams(streams: Tensor, read: Tensor) -> Tensor:
    """The weighted sum of the streams.

    streams: [rows, S, width]; read: [rows, S] float32. Returns [rows, width] in the dtype of the streams, summed in
    float32.
    """
    total = streams[:, 0].float() * read[:, :1]
    for at in range(1, streams.shape[1]):
        total = total + streams[:, at].float() * read[:, at : at + 1]
    return total.to(streams.dtype)


@op
def collapse_norm(streams: Tensor, read: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`collapse_streams`, and `rms_norm` of what it gives.

    streams, read: as of `collapse_streams`. weight: [width]. Returns [rows, width] in the dtype of the streams.
    """
    return rms_norm.reference(collapse_streams.reference(streams, read), weight, eps)


@op
def expand_streams(
    y: Tensor, streams: Tensor, write: Tensor, mix: Tensor, also: Tensor | None = None
) -> Tensor:
    """The streams behind a layer: what it says, by weight, and the streams before it, mixed.

    y: [rows, width]; streams: [rows, S, width]; write: [rows, S] float32; mix: [rows, S, S] float32, whose first
    index is summed over. also: [rows, width], what another part of the layer says, which is added to y first, in its dtype.
    Returns a new [rows, S, width] in the dtype of the streams, summed in float32.
    """
    if also is not None:
        y = y + also
    wide = streams.float()
    total = write.unsqueeze(-1) * y.float().unsqueeze(1)
    for at in range(streams.shape[1]):
        total = total + mix[:, at].unsqueeze(-1) * wide[:, at : at + 1]
    return total.to(streams.dtype)


def _project(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """Products of the flattened streams with `fn`, scaled as if the streams had unit root mean square."""
    flat = streams.flatten(1).float()
    scale = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + norm_eps)
    # Not a matrix product: the sums of a row must not depend on how many rows there are.
    found = [(flat[band].unsqueeze(1) * fn).sum(dim=-1) for band in bands(len(flat), fn.numel())]
    return (torch.cat(found) if found else flat.new_empty((0, len(fn)))) * scale
