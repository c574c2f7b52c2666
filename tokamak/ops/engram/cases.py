"""Hashes at the start of a text and far in it, and gates of streams of several sizes."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.core.minifloat import UE8M0
from tokamak.ops.case import Case, seeded, tolerance_of
from tokamak.ops.paged_cases import STEPS, Requests
from tokamak.ops.quantize.blocks import encode_fp8

MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)
PRIMES = ((997, 1009), (1013, 1019), (1021, 1031))
VOCAB = 320


def _rows(name: str, step: Requests) -> tuple[object, ...]:
    generator = seeded(name)
    requests, positions = len(step.lengths), step.positions()
    history = torch.randint(0, VOCAB, (requests + 2, 64), generator=generator, dtype=torch.int32)
    slots = (torch.randperm(requests + 1, generator=generator)[:requests] + 1).int()
    ids = torch.randint(0, 99092, (VOCAB,), generator=generator)
    out = torch.full((len(positions), 6), -7, dtype=torch.int64)
    return (
        history, slots, positions, step.starts(), step.width, ids, 39, torch.tensor(MULTIPLIERS),
        torch.tensor(PRIMES), out,
    )  # fmt: skip


def _gate(name: str, rows: int, width: int, size: float, dtype: torch.dtype) -> tuple[object, ...]:
    generator = seeded(name)
    streams = (torch.randn((rows, 4, width), generator=generator) * size).to(dtype)
    keys = torch.randn((rows, 4 * width), generator=generator).to(dtype)
    values = torch.randn((rows, width), generator=generator).to(dtype)
    return streams, keys, values, 1 + 0.1 * torch.randn((4, width), generator=generator), 1e-20


def _values(
    name: str, rows: int, sizes: tuple[int, int], scales: torch.dtype | None
) -> tuple[object, ...]:
    generator = seeded(name)
    columns, group = sizes
    sizes_of_rows = torch.randint(-9, 9, (50, 1), generator=generator).float().exp2()
    table = torch.randn((50, columns), generator=generator) * sizes_of_rows
    places = torch.randint(0, 50, (rows,), generator=generator)
    out = torch.full((rows, columns), -7.0, dtype=torch.bfloat16)
    if scales is None:
        return table, None, places, out
    codes, powers = encode_fp8(table, group)
    drawn = powers if scales == UE8M0 else torch.rand(powers.shape, generator=generator)
    return codes, drawn, places, out


engram_values_cases = [
    Case(name, partial(_values, name, rows, sizes, scales), 0.0, changed=(3,))
    for kind, scales in (
        (" of powers of two", UE8M0),
        ("", torch.float32),
        (" of plain numbers", None),
    )
    for rows, sizes in ((0, (64, 32)), (1, (256, 32)), (7, (96, 32)), (3, (48, 48)))
    for name in [f"{rows} of {sizes[0]} by {sizes[1]}{kind}"]
]
engram_rows_cases = [
    Case(name, partial(_rows, name, step), 0.0, changed=(9,)) for name, step in STEPS.items()
]
engram_gate_cases = [
    Case(title, partial(_gate, title, rows, width, size, dtype), tolerance_of(dtype))
    for dtype in (torch.float32, torch.bfloat16)
    for rows, width, size in ((1, 64, 1.0), (5, 96, 1.0), (33, 33, 1e-4), (0, 32, 1.0))
    for title in [f"{rows}x{width} of {size:g} {str(dtype).removeprefix('torch.')}"]
]
