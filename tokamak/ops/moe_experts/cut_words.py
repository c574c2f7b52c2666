"""Where the bits of 4-bit numbers lie in words that kernels cut numbers out of, two of a word at a time.

A number of E2M1, sign, exponent and mantissa, becomes one of bfloat16 where its sign is at bit 15 of a half word and the
others at bits 8 to 6. Of the eight numbers of a word, two lie so already, one in each half, two more need one shift, and
the rest one for signs and one for the others; were numbers four bits each in turn, nearly all would need two.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))
"""Of the four numbers of a half word: the bit of the sign, and the lowest of the others."""


def in_places(codes: Tensor) -> Tensor:
    """Codes in the order of columns, the even one low, with their bits in `PLACES`: uint8 [..., bytes], whole half words."""
    halves = _halves(codes)
    placed = torch.zeros_like(halves)
    for at, (sign, size) in enumerate(PLACES):
        code = halves >> 4 * at
        placed |= (code >> 3 & 1) << sign | (code & 7) << size
    return _bytes(placed, codes)


def in_columns(placed: Tensor) -> Tensor:
    """What `in_places` was given."""
    halves = _halves(placed)
    codes = torch.zeros_like(halves)
    for at, (sign, size) in enumerate(PLACES):
        codes |= ((halves >> sign & 1) << 3 | (halves >> size & 7)) << 4 * at
    return _bytes(codes, placed)


def _halves(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int16).to(torch.int32)


def _bytes(halves: Tensor, like: Tensor) -> Tensor:
    # Bit 15 is the sign of an int16: wider numbers are cut off, not clamped.
    return halves.to(torch.int16).view(torch.uint8).view(like.shape)
