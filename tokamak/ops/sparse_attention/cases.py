"""Windows that reach back before a text or a first row, lists with few and no entries, layers without any, and turns."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of
from tokamak.ops.paged_cases import LONG_STEPS, STEPS, Requests
from tokamak.ops.records import FP8, NVFP4, KVFormat

RATIO, MOST = 2, 6


def _make(
    name: str,
    step: Requests,
    window: int,
    has_entries: bool,
    dtype: torch.dtype,
    *,
    has_starts: bool = False,
) -> tuple[object, ...]:
    generator, heads, dim = seeded(name), 4, 32
    table = step.table(generator)
    positions = step.positions()
    tokens = len(positions)
    q = torch.randn((tokens, heads, dim), generator=generator).to(dtype)
    rows = step.cache(table, dim, generator).to(dtype)
    window_starts = _window_starts(step, window) if has_starts else None
    if window_starts is not None:
        for request, start in enumerate(window_starts.tolist()):
            for at in range(start):
                rows[table[request, at // step.block_tokens], 0, at % step.block_tokens] = float(
                    "nan"
                )
    entries = entry_table = chosen = None
    if has_entries:
        entry_table = step.table(generator)
        entries = step.cache(entry_table, dim, generator, ratio=RATIO).to(dtype)
        visible = (positions + 1) // RATIO
        drawn = torch.rand((tokens, MOST), generator=generator) * visible.unsqueeze(1)
        # Each entry once: equal numbers after the first are none.
        chosen = drawn.int().sort(dim=1).values
        repeated = torch.zeros_like(chosen, dtype=torch.bool)
        repeated[:, 1:] = chosen[:, 1:] == chosen[:, :-1]
        chosen[repeated | (visible == 0).unsqueeze(1)] = -1
    sink = torch.randn(heads, generator=generator)
    return (
        q, rows, table, entries, entry_table, chosen, positions, step.starts(), step.width, window, window_starts,
        dim**-0.5, sink, torch.full_like(q, float("nan")),
    )  # fmt: skip


def _packed(
    name: str, step: Requests, window: int, has_entries: bool, dtype: torch.dtype
) -> tuple[object, ...]:
    """The same with rows as records in FP8, and entries in NVFP4."""
    inputs = list(_make(name, step, window, has_entries, dtype))
    forms: list[KVFormat | None] = [FP8, NVFP4 if has_entries else None]
    for place, form in zip((1, 3), forms, strict=True):
        rows = inputs[place]
        if form is not None and isinstance(rows, torch.Tensor):
            inputs[place] = form.pack(rows)
    return (*inputs, *forms)


def _turning(
    name: str, step: Requests, window: int, has_entries: bool, dtype: torch.dtype, turning: int
) -> tuple[object, ...]:
    """The same with `turning` numbers of a head turned back."""
    angles = torch.rand((300, turning // 2), generator=seeded(f"angles of {name}")) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    return (*_make(name, step, window, has_entries, dtype), None, None, table)


def _window_starts(step: Requests, window: int) -> Tensor:
    """First rows beside a request's last, behind it, inside the first query's window, at its edge, in front of it."""
    found: list[int] = []
    for at, (length, queries) in enumerate(zip(step.lengths, step.queries, strict=True)):
        query = length - queries
        starts = (
            length - 2, length, query - window // 2, query - window + 1, query - window,
        )  # fmt: skip
        found.append(max(0, starts[at % len(starts)]))
    return torch.tensor(found, dtype=torch.int32)


sparse_attention_cases = [
    Case(
        title,
        partial(_make, title, step, window, has_entries, dtype),
        tolerance_of(dtype),
        changed=(13,),
    )
    for dtype in (torch.float32, torch.bfloat16)
    for name, step in STEPS.items()
    for window in (1, 8, 33)
    for has_entries in (False, True)
    for title in [
        f"{name} window {window}{' and entries' if has_entries else ''} {str(dtype).removeprefix('torch.')}"
    ]
]
sparse_attention_cases += [
    Case(
        title,
        partial(_make, title, step, 128, True, torch.bfloat16),
        tolerance_of(torch.bfloat16),
        changed=(13,),
    )
    for name, step in LONG_STEPS.items()
    for title in [f"{name} window 128 and entries bfloat16"]
]
sparse_attention_cases += [
    Case(
        title,
        partial(_packed, title, STEPS[name], window, has_entries, dtype),
        tolerance_of(dtype),
        changed=(13,),
    )
    for name, window, has_entries, dtype in (
        ("small blocks", 33, True, torch.float32),
        ("decode", 8, True, torch.bfloat16),
        ("drafts", 33, False, torch.float32),
    )
    for title in [f"{name} of records{' and entries' if has_entries else ''}"]
]
sparse_attention_cases += [
    Case(
        title,
        partial(_make, title, step, window, has_entries, dtype, has_starts=True),
        tolerance_of(dtype),
        changed=(13,),
    )
    for name, step, window, has_entries, dtype in (
        ("drafts", STEPS["drafts"], 8, False, torch.float32),
        ("decode", STEPS["decode"], 33, True, torch.float32),
        ("two chunks", Requests(prefill=((5, 4), (3, 20))), 8, True, torch.bfloat16),
    )
    for title in [
        f"{name} from a first row on, window {window}{' and entries' if has_entries else ''} "
        f"{str(dtype).removeprefix('torch.')}"
    ]
]
sparse_attention_cases += [
    Case(
        title,
        partial(_turning, title, step, window, True, dtype, turning),
        tolerance_of(dtype),
        changed=(13,),
    )
    for name, window, dtype, turning in (
        ("decode", 33, torch.float32, 8),
        ("small blocks", 8, torch.bfloat16, 32),
        ("drafts", 8, torch.float32, 6),
    )
    for step in [STEPS[name]]
    for title in [f"{name} window {window} and entries turned back, {turning} numbers of a head"]
]
