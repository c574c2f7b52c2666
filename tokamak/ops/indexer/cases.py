"""Rows that see no entry, few and more than they may choose; equal scores; blocks of candidates, made and kept to."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded
from tokamak.ops.paged_cases import LENGTHS, STEPS, Requests
from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.sizes import FIELDS, score_bands

MOST, CANDIDATES, BLOCK_ENTRIES = 5, 3, 4
PROGRAMS = 13
"""That walk through keys by a plan."""
KINDS = ("alone", "makes candidates", "keeps to candidates")


def _make(
    name: str, step: Requests, ratio: int, kind: str, *, equal: bool = False, walks: bool = False
) -> tuple[object, ...]:
    generator, heads, dim = seeded(name), 4, 16
    table = step.table(generator)
    positions = step.positions()
    tokens = len(positions)
    q = torch.randn((tokens, heads, dim), generator=generator)
    weights = torch.randn((tokens, heads), generator=generator)
    keys = step.cache(table, dim, generator, ratio=ratio)
    if equal:
        # Sums of few whole numbers, so that they are exact and often the same.
        q, keys, weights = q.sign(), keys.sign(), weights.sign()
    within = None
    if kind == "keeps to candidates":
        count = max(1, table.shape[1] * step.block_tokens // ratio // BLOCK_ENTRIES)
        drawn = torch.rand((tokens, count), generator=generator).argsort(dim=1)[:, :CANDIDATES]
        within = torch.full((tokens, CANDIDATES), -1, dtype=torch.int32)
        within[:, : drawn.shape[1]] = drawn.sort(dim=1).values.int()
        within[1::2, -1] = -1
    blocks = None
    if kind == "makes candidates":
        blocks = torch.full((tokens, CANDIDATES), -7, dtype=torch.int32)
    plans = None
    if walks:
        parts = score_bands(tokens, table.shape[1] * keys.shape[2])
        plans = torch.full((len(parts), PROGRAMS, FIELDS), 77, dtype=torch.int32)
        fill_walk_plan.reference(
            step.starts(), positions, step.width, ratio, MOST, parts[0].stop, plans
        )
    return (
        q, weights, keys, table, positions, step.starts(), step.width, ratio, within, BLOCK_ENTRIES,
        torch.full((tokens, MOST), -7, dtype=torch.int32), blocks, plans,
    )  # fmt: skip


select_entries_cases = [
    Case(title, partial(_make, title, step, ratio, kind), 0.0, changed=(10, 11))
    for name, step in STEPS.items()
    for ratio in (1, 2)
    for kind in KINDS
    for title in [f"{name} by {ratio} {kind}"]
] + [
    Case(title, partial(_make, title, step, 1, kind, equal=True), 0.0, changed=(10, 11))
    for name, step in STEPS.items()
    for kind in KINDS
    for title in [f"equal scores {name} {kind}"]
]
select_entries_cases += [
    Case(title, partial(_make, title, LENGTHS, ratio, kind, equal=equal), 0.0, changed=(10, 11))
    for ratio, kind, equal in (
        (1, "alone", True),
        (4, "alone", False),
        (1, "makes candidates", False),
        (1, "keeps to candidates", False),
    )
    for title in [f"lengths by {ratio} {kind}{' of equal scores' if equal else ''}"]
]
select_entries_cases += [
    Case(title, partial(_make, title, step, ratio, kind, walks=True), 0.0, changed=(10, 11))
    for name, step, ratio, kind in (
        ("lengths", LENGTHS, 1, "alone"),
        ("lengths", LENGTHS, 4, "makes candidates"),
        ("drafts", STEPS["drafts"], 1, "makes candidates"),
    )
    for title in [f"walked {name} by {ratio} {kind}"]
]
