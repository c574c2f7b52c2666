"""Inputs of the sampling ops: vocabularies of real models and odd ones, ruled out tokens, ties, and rows with NaN."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import FLOAT32, Case, seeded

WEIGHT_SIZES = ((1, 2), (5, 1023), (3, 1024), (4, 1031), (2, 49152), (0, 64))
ARGMAX_SIZES = ((1, 1), (3, 17), (2, 2049), (33, 5003), (2, 151936), (0, 64))
TEMPERATURES = (1.0, 0.5, 2.0, 1e-4, 100.0)


def _scores(name: str, rows: int, vocab: int) -> Tensor:
    return torch.randn((rows, vocab), generator=seeded(name)) * 6


def _weights(name: str, rows: int, vocab: int) -> tuple[object, ...]:
    scores = _scores(name, rows, vocab)
    scores[:, ::7] = float("-inf")
    scores[:, 1] = 3.0
    inverses = torch.tensor(TEMPERATURES).reciprocal().repeat(rows)[:rows]
    return scores, scores.amax(dim=1), inverses


token_weights_cases = [
    Case(name, partial(_weights, name, rows, vocab), FLOAT32)
    for rows, vocab in WEIGHT_SIZES
    for name in [f"{rows}x{vocab}"]
]


def _logits(name: str, rows: int, vocab: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Bfloat16 rows of some thousand numbers have ties."""
    return (_scores(name, rows, vocab).to(dtype),)


def _odd_rows(dtype: torch.dtype) -> tuple[object, ...]:
    """Rows that only an exact comparison gets right, seen through a wider tensor."""
    logits = torch.full((7, 6000), -1.0)
    logits[0, [4100, 300, 5999]] = 2.5
    logits[1] = float("-inf")
    logits[2, 5999] = float("inf")
    logits[3, 77] = float("inf")
    logits[3, [5000, 4500]] = float("nan")
    logits[4] = -0.0
    logits[4, 3000:] = 0.0
    logits[5] = -1e30
    logits[5, 2047] = -9e29
    logits[6, 5998] = torch.tensor(0xFFC00000 - 2**32, dtype=torch.int32).view(torch.float32)
    return (logits.to(dtype)[:, :5999],)


argmax_rows_cases = [
    Case(title, partial(_logits, title, rows, vocab, dtype), 0.0)
    for dtype in (torch.float32, torch.bfloat16)
    for rows, vocab in ARGMAX_SIZES
    for title in [f"{rows}x{vocab} {str(dtype).removeprefix('torch.')}"]
] + [
    Case(f"odd rows {str(dtype).removeprefix('torch.')}", partial(_odd_rows, dtype), 0.0)
    for dtype in (torch.float32, torch.bfloat16)
]
