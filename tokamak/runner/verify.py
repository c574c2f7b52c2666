"""Does every recording give what the eager forward gives? Asked before the first request, at the edges of every bucket.

Requests of random tokens are put in the empty caches, with lengths, blocks and slots in no order. Each bucket then
runs at the sizes where padding begins and ends, three ways: replayed, eagerly at the same padding, eagerly at its
own size. Every case gets new tokens, so that a row left over from the case before is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.plan import Grants, Int32s, LateShape, Mode, StepPlan, StepShape
from tokamak.errors import BucketNotRecorded
from tokamak.graphs.ladder import Ladder
from tokamak.runner.check import allowed_difference, worst_difference
from tokamak.runner.forward import Forward
from tokamak.runner.inputs import InputArena
from tokamak.runner.prepare import Preparation
from tokamak.runner.record import Kind
from tokamak.runner.shape import lone_late, lone_shape
from tokamak.runner.tails import Tails

CUT_ROWS = 3
"""Rows of a prompt that late layers do not run for where their recordings are verified, where a step has room."""

CONTEXT_BLOCKS = 3
"""Blocks a request of the verification has, where there are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One bucket at one size."""

    graph: Kind
    bucket: int
    size: int
    worst: float
    """The largest difference to the eager forward, relative to the largest number of its row."""
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the verification may use: all of the empty caches."""

    max_requests: int
    max_tokens: int
    max_model_len: int
    block_tokens: int
    usable_blocks: int
    groups: int
    vocab_tokens: int
    q_width: int


class Verifier:
    """Runs the cases of a rank's recordings; the same cases on every rank."""

    def __init__(
        self,
        room: Room,
        *,
        inputs: InputArena,
        preparation: Preparation,
        forward: Forward,
        tails: Tails,
        requests: Ladder,
        tokens: Ladder,
        late: Ladder,
    ) -> None:
        self._tails = tails
        self._requests = requests
        self._tokens = tokens
        self._late = late
        self._room = room
        self._inputs = inputs
        self._preparation = preparation
        self._forward = forward
        self._random = np.random.default_rng(0)

    @torch.inference_mode()
    def verify(self) -> tuple[Verdict, ...]:
        """The verdicts of recorded request buckets, then of those of token and tail rows, smallest first."""
        self._capacity = self._occupy(max((*self._tokens.buckets, *self._late.buckets), default=0))
        self._before = self._fill_caches()
        found = [
            self._compare("request", bucket, size, self._decode_plan(size))
            for bucket, size in edges(self._requests)
            if size <= len(self._before)
        ]
        found += [
            self._compare("token", bucket, size, self._mixed_plan(size))
            for bucket, size in edges(self._tokens)
            if size <= int(self._capacity[0])
        ]
        found += [
            self._compare_late(bucket, size)
            for bucket, size in edges(self._late)
            if size <= int(self._capacity[0])
        ]
        return tuple(verdict for verdict in found if verdict is not None)

    def _occupy(self, longest: int) -> Int32s:
        """Give every slot blocks in no order; returns the tokens each can hold. int32 [requests]."""
        room = self._room
        blocks = min(room.usable_blocks, room.max_requests)
        per_request = min(
            CONTEXT_BLOCKS,
            room.usable_blocks // blocks,
            -(-room.max_model_len // room.block_tokens),
        )
        counts = np.full(blocks, per_request, dtype=np.int32)
        spare = room.usable_blocks - int(counts.sum())
        wanted = -(-min(longest, room.max_model_len) // room.block_tokens) - per_request
        counts[0] += max(0, min(spare, wanted))
        ids = self._random.permutation(room.usable_blocks)[: counts.sum()].astype(np.int32) + 1
        slots = np.repeat(np.arange(1, blocks + 1, dtype=np.int32), counts)
        entries = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        groups = np.repeat(np.arange(room.groups, dtype=np.int32), len(ids))
        self._grants = Grants(
            groups=groups,
            slots=np.tile(slots, room.groups),
            entries=np.tile(entries, room.groups),
            block_ids=np.tile(ids, room.groups),
        )
        return np.minimum(counts * room.block_tokens, room.max_model_len).astype(np.int32)

    def _fill_caches(self) -> Int32s:
        """Run every request's first tokens eagerly, in chunks; returns how many each has. int32 [requests]."""
        widest = self._capacity - self._room.q_width
        short = np.minimum(widest, CONTEXT_BLOCKS * self._room.block_tokens)
        before = self._random.integers(0, short + 1).astype(np.int32)
        for slot, tokens in enumerate(self._capacity, start=1):
            self._draw_tokens(slot, 0, int(tokens))
        grants = self._grants
        # No step is longer than the largest bucket: every other limit allows that many.
        longest = max(*self._tokens.buckets, *self._late.buckets, *self._requests.buckets, 1)
        for slot in np.flatnonzero(before) + 1:
            tokens = int(before[slot - 1])
            for start in range(0, tokens, longest):
                row = (int(slot), start, min(longest, tokens - start))
                self._run_eagerly(self._plan([row], prefill_rows=1, grants=grants))
                grants = Grants.none()
        if len(grants.slots):
            self._inputs.tables.apply(grants)
        return before

    def _decode_plan(self, size: int) -> StepPlan:
        order = self._random.permutation(len(self._before))[:size]
        rows = [(int(at) + 1, int(self._before[at]), self._room.q_width) for at in order]
        return self._plan(rows, prefill_rows=0, grants=Grants.none())

    def _mixed_plan(self, size: int, cut: int = 0) -> StepPlan:
        """A chunk of the first request, and up to two decode rows behind it; `cut` rows of the chunk come on top."""
        width = self._room.q_width
        decode = min(2, len(self._before) - 1, (size - 1) // width)
        rows = [(1, 0, cut + size - decode * width)]
        rows += [(at + 1, int(self._before[at]), width) for at in range(1, decode + 1)]
        return self._plan(rows, prefill_rows=1, grants=Grants.none())

    def _plan(
        self, rows: list[tuple[int, int, int]], *, prefill_rows: int, grants: Grants
    ) -> StepPlan:
        """A plan of (slot, computed before, tokens), with new tokens in all its rows."""
        for slot, before, tokens in rows:
            self._draw_tokens(slot, before, before + tokens)
        slots, before, lens = np.array(rows, dtype=np.int32).T.copy()
        final = np.zeros(len(rows), dtype=np.bool_)
        final[:prefill_rows] = True
        return StepPlan(
            seq=-1,
            request_ids=("",) * len(rows),
            slots=slots,
            query_lens=lens,
            computed_before=before,
            prefill_rows=prefill_rows,
            final_chunk=final,
            admissions=(),
            grants=grants,
        )

    def _draw_tokens(self, slot: int, start: int, stop: int) -> None:
        ids = self._random.integers(0, self._room.vocab_tokens, stop - start).astype(np.int32)
        self._inputs.history[slot, start:stop] = torch.from_numpy(ids).to(
            self._inputs.history.device
        )

    def _run_eagerly(self, plan: StepPlan) -> Tensor:
        shape = _shape(plan, Mode.EAGER, plan.scheduled_requests, plan.scheduled_tokens)
        shape = replace(shape, late=self._late_eagerly(plan))
        return _result(self._forward.eager, self._preparation.prepare(plan, shape), plan)

    def _late_eagerly(self, plan: StepPlan) -> LateShape | None:
        """How late layers run in a step of prefill rows that does not replay them."""
        rows = self._tails.count(plan) if plan.prefill_rows else 0
        return lone_late(Mode.EAGER, rows, rows) if rows else None

    def _compare_late(self, bucket: int, size: int) -> Verdict | None:
        """Late layers from their recording, behind early ones that run eagerly and for some rows more."""
        spare = min(self._room.max_tokens, int(self._capacity[0])) - size
        cut = max(0, min(CUT_ROWS, spare))
        self._tails.set(1, cut)
        verdict = self._compare("decoder", bucket, size, self._mixed_plan(size, cut))
        self._tails.set(1, 0)
        return verdict

    def _shape_of(self, kind: Kind, bucket: int, size: int, plan: StepPlan) -> StepShape:
        requests, tokens = plan.scheduled_requests, plan.scheduled_tokens
        match kind:
            case "request":
                width = self._room.q_width
                return _shape(plan, Mode.REQUEST_GRAPH, bucket, bucket * width)
            case "token":
                shape = _shape(plan, Mode.TOKEN_GRAPH, requests, bucket)
                return replace(shape, late=self._late_eagerly(plan))
            case "decoder":
                shape = _shape(plan, Mode.EAGER, requests, tokens)
                return replace(shape, late=lone_late(Mode.TOKEN_GRAPH, size, bucket))

    def _compare(self, kind: Kind, bucket: int, size: int, plan: StepPlan) -> Verdict | None:
        """None for a bucket that all ranks go without: why was logged when it failed to record."""
        context = self._preparation.prepare(plan, self._shape_of(kind, bucket, size, plan))
        try:
            replayed = _result(self._forward.run, context, plan)
        except BucketNotRecorded:
            return None
        padded = _result(self._forward.eager, context, plan)
        eager = self._run_eagerly(plan)
        from_padded = worst_difference(replayed, padded)
        from_eager = worst_difference(replayed, eager)
        return Verdict(
            graph=kind,
            bucket=bucket,
            size=size,
            worst=max(from_padded, from_eager),
            ok=from_padded <= allowed_difference(eager, same_size=True)
            and from_eager <= allowed_difference(eager, same_size=False),
        )


def _result(
    forward: Callable[[StepContext], Tensor | None], context: StepContext, plan: StepPlan
) -> Tensor:
    """Hidden states of a plan's rows, to keep."""
    hidden = forward(context)
    assert hidden is not None, "every step that is verified has rows for late layers"
    return hidden[: plan.scheduled_tokens].clone()


def edges(ladder: Ladder) -> Iterator[tuple[int, int]]:
    """(bucket, size) where padding begins and ends: the first size of a bucket, one below it, and itself."""
    below = 0
    for bucket in ladder.buckets:
        for size in sorted({below + 1, max(below + 1, bucket - 1), bucket}):
            yield bucket, size
        below = bucket


def _shape(plan: StepPlan, mode: Mode, requests: int, tokens: int) -> StepShape:
    return lone_shape(
        mode,
        scheduled=(plan.scheduled_requests, plan.scheduled_tokens),
        running=(requests, tokens),
        q_width=0 if plan.prefill_rows else tokens // requests,
        dummy=False,
        why="verifying",
    )
