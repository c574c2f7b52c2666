"""Inputs of the sampling ops: vocabularies of real models and odd ones, ruled out tokens, ties, and rows with NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import FLOAT32, Case, seeded
from tokamak.ops.sample.reference import TABLE_COLUMNS
from tokamak.ops.sample.uniform import FIRST, GOLDEN, SECOND

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

DRAWS = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.99, "min_p": 0.3},
    {"top_k": 700, "min_p": 0.3},
    {"top_k": 5000},
    {"top_k": 5000, "top_p": 0.97},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.98, "temperature": 2.5},
    {"min_p": 0.1},
    {"min_p": 1e-9},
    {"top_p": 0.95, "min_p": 1e-6, "temperature": 0.7},
)


def draw_table(asked: Sequence[Mapping[str, float]], vocab: int) -> Tensor:
    """What slots draw with, as `draw_rows` reads it: [slots, TABLE_COLUMNS]."""
    table = torch.empty((len(asked), TABLE_COLUMNS), dtype=torch.int64)
    for row, numbers in zip(table, asked, strict=True):
        floats = [
            numbers.get("temperature", 1.0),
            numbers.get("top_p", 1.0),
            numbers.get("min_p", 0.0),
        ]
        row[:3] = torch.tensor(floats, dtype=torch.float64).view(torch.int64)
        row[3] = min(int(numbers.get("top_k", vocab)), vocab)
        row[4] = torch.randint(-(2**63), 2**63 - 1, (), generator=seeded(f"{numbers}"))
    return table


def _draws(
    name: str, vocab: int, scores: Tensor, kinds: Sequence[Mapping[str, float]] = DRAWS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of all kinds, in other slots than their own; slots without a row hold nothing that can be drawn with."""
    rows = scores.shape[0]
    slots = torch.randperm(2 * rows, generator=seeded(name))[:rows]
    table = torch.full((2 * rows, TABLE_COLUMNS), -1)
    table[slots] = draw_table([kinds[row % len(kinds)] for row in range(rows)], vocab)
    positions = torch.randint(0, 2**20, (rows,), generator=seeded(name))
    return scores, table, slots.int(), positions.int()


def _plain_draws(name: str, vocab: int, spread: float) -> tuple[object, ...]:
    return _draws(name, vocab, _scores(name, len(DRAWS), vocab) * (spread / 6))


def _tied_draws(name: str, vocab: int, step: float) -> tuple[object, ...]:
    """Scores of few different values: thousands are equal, at the cut and above it."""
    return _draws(name, vocab, (_scores(name, len(DRAWS), vocab) / 6 / step).round() * step)


def _ruled_out_draws(name: str, vocab: int) -> tuple[object, ...]:
    """Almost every token is ruled out, by whole blocks."""
    scores = torch.full((len(DRAWS), vocab), float("-inf"))
    scores[:, [7, vocab // 2, vocab - 1]] = torch.tensor([1.5, 2.0, 2.0])
    return _draws(name, vocab, scores)


def _far_draws(name: str, vocab: int) -> tuple[object, ...]:
    """Scores whose weights are 0 or 1, below zero and around both zeros, in a part of a wider tensor."""
    wide = torch.zeros((len(DRAWS), vocab + 3)) - _scores(name, len(DRAWS), vocab + 3).abs() * 1e30
    wide[::2, :vocab] = _scores(name, len(DRAWS), vocab)[::2] - 1e4
    wide[1::2, ::5] = 0.0
    wide[1::2, 1::5] = -0.0
    return _draws(name, vocab, wide[:, :vocab])


def _even_draws(name: str, vocab: int) -> tuple[object, ...]:
    """Tokens of about equal weight: one too many or too few among the kept ones changes what many rows draw."""
    kinds = ("min_p", "top_p", "min_p", "top_k")
    shares = (0.88 + row / 400 if row % 2 == 0 else row / 40 for row in range(36))
    asked = [
        {kinds[row % 4]: 5 + row if row % 4 == 3 else share} for row, share in enumerate(shares)
    ]
    scores = _scores(name, len(asked), vocab) * 0.005
    return _draws(name, vocab, scores, asked)


def key_of(uniform: float, position: int) -> int:
    """The key whose number at a position is the one asked for, a multiple of 2**-53: `uniforms_of` turned around."""
    bits, all_bits = int(uniform * 2**53) << 11, 2**64
    bits = (bits ^ (bits >> 31) ^ (bits >> 62)) * pow(SECOND, -1, all_bits) % all_bits
    bits = (bits ^ (bits >> 27) ^ (bits >> 54)) * pow(FIRST, -1, all_bits) % all_bits
    key = ((bits ^ (bits >> 30) ^ (bits >> 60)) - (position + 1) * GOLDEN) % all_bits
    return key - all_bits if key >> 63 else key


def _border_draws(name: str, vocab: int) -> tuple[object, ...]:
    """Eight equal tokens, and numbers that are exactly where one's share ends, or as high as they get."""
    kinds = ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.5})
    numbers = (0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-53)
    asked = [kind for kind in kinds for _ in numbers]
    scores = torch.full((len(asked), vocab), float("-inf"))
    scores[:, 5 : vocab - 3 : vocab // 8] = 1.5
    scores, table, slots, positions = _draws(name, vocab, scores, asked)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        table[slot, 4] = key_of(numbers[row % len(numbers)], position)
    return scores, table, slots, positions


draw_rows_cases = [
    *(
        Case(f"{vocab} tokens {spread} apart", partial(_plain_draws, f"{vocab} {spread}", vocab, spread), 0.0)
        for vocab, spread in ((2, 1.0), (33, 2.0), (1500, 2.0), (9000, 1.0), (9000, 5.0))
    ),
    Case("few values", partial(_tied_draws, "few values", 9000, 0.5), 0.0),
    Case("one value", partial(_tied_draws, "one value", 9000, 100.0), 0.0),
    Case("about equal", partial(_even_draws, "about equal", 400), 0.0),
    Case("on borders", partial(_border_draws, "on borders", 1600), 0.0),
    Case("ruled out", partial(_ruled_out_draws, "ruled out", 7000), 0.0),
    Case("far apart", partial(_far_draws, "far apart", 3000), 0.0),
    Case("no rows", partial(_draws, "no rows", 64, torch.empty((0, 64))), 0.0),
]  # fmt: skip
