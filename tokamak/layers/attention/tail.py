"""Which rows of a step do late layers run for? The newest of each prompt, and all decode rows.

`TailRows` is chosen once a step, on the host, and published with the step's other numbers. `TailBuffers` hands early
rows over to late layers and late results back to the step's order; nothing else knows that there are two orders of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext
from tokamak.core.inputs import AttnHalf, AttnStep, StepInputs
from tokamak.core.plan import Int32s, LateShape, StepPlan
from tokamak.errors import TailOverflow


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRows:
    """The token rows of a step that late layers run for, in the step's order."""

    rows: Int32s  # [tail]      token rows of the step
    counts: Int32s  # [requests]  how many each request has
    first: Int32s  # [requests]  the first position late layers run for, in this step or before

    @classmethod
    def of(cls, plan: StepPlan, first: Int32s) -> TailRows:
        """Choose rows at a position of `first` or behind it. first: int32 [requests]; 0 asks for every row."""
        counts = tail_counts(plan, first)
        starts = np.cumsum(plan.query_lens, dtype=np.int32) - plan.query_lens
        place = np.arange(plan.scheduled_tokens, dtype=np.int32)
        skipped = np.repeat(starts + plan.query_lens - counts, plan.query_lens)
        rows = np.flatnonzero(place >= skipped).astype(np.int32)
        return cls(rows=rows, counts=counts, first=first)

    def stage(self, rows: Int32s, starts: Int32s, first: Int32s) -> None:
        """Write what late inputs are made from.

        rows: int32 [running tokens]. starts, first: int32 [running requests + 1] and [running requests].
        Rows of padding carry what the first row of the step has; requests of padding have no row.
        """
        real, requests = len(self.rows), len(self.counts)
        rows[:real], rows[real:] = self.rows, 0
        starts[0] = 0
        np.cumsum(self.counts, out=starts[1 : requests + 1])
        starts[requests + 1 :] = real
        first[:requests], first[requests:] = self.first, 0


def tail_counts(plan: StepPlan, first: Int32s) -> Int32s:
    """How many rows each request has at a position of `first` or behind it. Both int32 [requests]."""
    return np.clip(plan.lengths - first, 0, plan.query_lens).astype(np.int32)


def tail_bytes(most: int, *, groups: int, carried_rows: int, carried_bytes: int) -> int:
    """Bytes of `TailBuffers` for up to `most` rows: numbers, ids and positions, and write slots of each group."""
    return most * (8 + 4 + 4 + 8 * groups) + carried_rows * carried_bytes


class TailBuffers:
    """Fixed buffers of the late stage's inputs, so that a recording finds the next step's at the same addresses.

    Args:
        rows: int32 [most], where a step's tail rows are published.
        query_starts: int32 [requests + 1], where the first tail row of each request is.
        window_starts: int32 [requests], where windows of late layers begin (`Stages.bounded`); None for all rows.
        groups: by cache group, the buffers that early layers read.
        carried_rows: rows of the largest recording of late layers.
        carried_bytes: of a row that early layers leave.
    """

    def __init__(
        self,
        rows: Tensor,
        query_starts: Tensor,
        *,
        window_starts: Tensor | None,
        groups: Mapping[str, PagedBuffers],
        carried_rows: int,
        carried_bytes: int,
    ) -> None:
        most = len(rows)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        self._published, self._query_starts = rows, query_starts
        self._window_starts = window_starts
        self._rows = zeros(most, dtype=torch.int64)
        self._token_ids = zeros(most, dtype=torch.int32)
        self._positions = zeros(most, dtype=torch.int32)
        self._groups = {
            name: buffers.of_rows(zeros(most, dtype=torch.int64), query_starts)
            for name, buffers in groups.items()
        }
        self._carried = zeros(carried_rows, carried_bytes, dtype=torch.uint8)

    def prepare(self, tail: TailRows, context: StepContext, late: LateShape) -> StepContext:
        """The context of a step's late forward, whose rows are published: a bucket's, or as many as there are.

        Raises:
            TailOverflow: there are more rows than that, or the buffers are smaller.
        """
        real, running = len(tail.rows), late.running_tokens
        if not real <= running <= len(self._rows):
            raise TailOverflow(
                f"{real} tail rows were to run as {running}, in buffers of {len(self._rows)}",
                hint="late layers never run for more rows than max_num_batched_tokens",
            )
        shape = replace(
            context.shape,
            mode=late.mode,
            scheduled_tokens=real,
            running_tokens=running,
            late=None,
        )
        return replace(
            context,
            shape=shape,
            inputs=self._fill(real, context.inputs, running),
            attn=self._attention(tail, context.attn),
        )

    def gather(self, early: Tensor, late: StepContext) -> Tensor:
        """The rows that late layers run for, of uint8 [tokens, carried_bytes]."""
        return early.index_select(0, self._rows[: late.shape.running_tokens])

    def hand_over(self, early: Tensor, late: StepContext) -> None:
        """The same, into the buffer that recordings read."""
        running = late.shape.running_tokens
        torch.index_select(early, 0, self._rows[:running], out=self._carried[:running])

    def carried(self, running_tokens: int) -> Tensor:
        """What was handed over: uint8 [running_tokens, carried_bytes]."""
        return self._carried[:running_tokens]

    def hand_back(self, hidden: Tensor, late: StepContext, tokens: int) -> Tensor:
        """Results in the step's order, zero in rows late layers did not run for: [tokens, width]."""
        real = late.shape.scheduled_tokens
        out = hidden.new_zeros((tokens, *hidden.shape[1:]))
        return out.index_copy_(0, self._rows[:real], hidden[:real])

    def _fill(self, real: int, step: StepInputs, running: int) -> StepInputs:
        requests = step.query_starts.shape[0] - 1
        rows = self._rows[:running]
        rows.copy_(self._published[:running])
        for to, of in ((self._token_ids, step.token_ids), (self._positions, step.positions)):
            torch.index_select(of, 0, rows, out=to[:running])
            to[real:running].zero_()
        for name, buffers in self._groups.items():
            slots = buffers.write_slots
            torch.index_select(step.rows[name].write_slots, 0, rows, out=slots[:running])
            slots[real:running].fill_(-1)
        starts = self._window_starts
        return replace(
            step,
            token_ids=self._token_ids[:running],
            positions=self._positions[:running],
            query_starts=self._query_starts[: requests + 1],
            rows={name: of.view(requests, running) for name, of in self._groups.items()},
            window_starts=None if starts is None else starts[:requests],
        )

    def _attention(self, tail: TailRows, attn: AttnStep) -> AttnStep:
        """The same requests with the tail's rows; a half without any is none."""
        prefill, decode, at = attn.prefill, attn.decode, 0
        if prefill is not None:
            at = int(tail.counts[prefill.requests].sum())
            starts = self._query_starts[: prefill.last_request + 1]
            prefill = _moved(prefill, 0, at, starts) if at else None
        if decode is not None:
            tokens = decode.last_token - decode.first_token
            decode = _moved(decode, at, at + tokens, decode.query_starts)
        return AttnStep(prefill=prefill, decode=decode)


def _moved(half: AttnHalf, first: int, last: int, query_starts: Tensor) -> AttnHalf:
    return replace(half, first_token=first, last_token=last, query_starts=query_starts)
