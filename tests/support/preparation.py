"""Decode plans, shapes and prepared inputs for tests of step preparation, made of the real classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.support.factory import cache_groups
from tests.support.steps import a_build
from tokamak.cache.groups import CacheGroup, group_sub_caches
from tokamak.cache.sub_cache import SubCache
from tokamak.cache.view import Site
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Grants, Mode, StepPlan, StepShape
from tokamak.device.waits import HostWaits
from tokamak.runner.inputs import InputArena

BLOCK_TOKENS = 4


def two_groups() -> tuple[CacheGroup, ...]:
    """A group that keeps every token, and one that keeps a window."""
    return group_sub_caches(
        [
            SubCache("keys", (0, 1), heads=2, width=8, dtype="float32"),
            SubCache("window", (0, 1), heads=2, width=8, dtype="float32", keep_tokens=8),
        ]
    )


def an_arena(
    *,
    max_requests: int = 8,
    max_tokens: int = 64,
    max_model_len: int = 256,
    groups: tuple[CacheGroup, ...] | None = None,
    block_tokens: int = BLOCK_TOKENS,
    max_tail: int = 0,
    site: Site | None = None,
    kind: type[InputArena] = InputArena,
    device: str = "cpu",
    waits: HostWaits | None = None,
) -> InputArena:
    """An arena, on the CPU unless another device is named."""
    return kind(
        replace(a_build(max_model_len=max_model_len), device=torch.device(device)),
        cache_groups() if groups is None else groups,
        max_requests=max_requests,
        max_tokens=max_tokens,
        block_tokens=block_tokens,
        max_tail=max_tail,
        site=site,
        waits=waits,
    )


def a_decode_plan(
    computed_before: Sequence[int],
    *,
    q_width: int = 1,
    slots: Sequence[int] | None = None,
    grants: Grants | Sequence[tuple[int, int]] = (),
    seq: int = 0,
) -> StepPlan:
    """Decode rows with so many cached tokens, in slots 1, 2, … unless given.

    grants: all of a plan's, or pairs of slot and block id for entry 0 of the first group.
    """
    rows = len(computed_before)
    if not isinstance(grants, Grants):
        pairs = np.array(grants, dtype=np.int32).reshape(-1, 2)
        none = np.zeros(len(pairs), dtype=np.int32)
        grants = Grants(groups=none, slots=pairs[:, 0], entries=none, block_ids=pairs[:, 1])
    chosen = range(1, rows + 1) if slots is None else slots
    return StepPlan(
        seq=seq,
        request_ids=tuple(f"r{slot}" for slot in chosen),
        slots=np.array(chosen, dtype=np.int32),
        query_lens=np.full(rows, q_width, dtype=np.int32),
        computed_before=np.array(computed_before, dtype=np.int32),
        prefill_rows=0,
        final_chunk=np.zeros(rows, dtype=np.bool_),
        admissions=(),
        grants=grants,
    )


def shape_of(
    plan: StepPlan,
    *,
    token_padding: int = 0,
    running_requests: int | None = None,
    mode: Mode = Mode.EAGER,
    dummy: bool = False,
) -> StepShape:
    """The shape of a plan: padded in request rows (uniform decode) or in token rows."""
    requests = plan.scheduled_requests if running_requests is None else running_requests
    widths = set(plan.query_lens.tolist())
    q_width = (
        widths.pop() if not plan.prefill_rows and not token_padding and len(widths) == 1 else 0
    )
    tokens = requests * q_width if q_width else plan.scheduled_tokens + token_padding
    return StepShape(
        mode=mode,
        dummy=dummy,
        scheduled_requests=plan.scheduled_requests,
        scheduled_tokens=plan.scheduled_tokens,
        running_requests=requests,
        running_tokens=tokens,
        q_width=q_width,
        cut=None,
        draft_requests=0,
        wanted=None,
        late=None,
        uniform_rows=True,
        why="test",
    )


def prepared(arena: InputArena, plan: StepPlan, shape: StepShape) -> StepInputs:
    """The inputs of a step, by the three calls of a preparation."""
    arena.stage(plan, shape)
    arena.publish()
    return arena.fill(plan, shape)
