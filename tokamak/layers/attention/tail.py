"""Which rows of a step do late layers run for? The newest of each prompt, and all decode rows.

`TailRows` is chosen once a step, on the host. `TailBuffers` hands early rows over to late layers and late results
back to the step's order; nothing else knows that there are two orders of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext
from tokamak.core.inputs import AttnHalf, AttnStep, Rows, StepInputs
from tokamak.core.plan import Int32s, StepPlan
from tokamak.errors import TailOverflow


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRows:
    """The token rows of a step that late layers run for, in the step's order."""

    rows: Int32s  # [tail]      token rows of the step
    counts: Int32s  # [requests]  how many each request has
    inverse: (
        Int32s  # [tokens]    where a token row of the step is among the tail's, -1 where it is not
    )

    @classmethod
    def of(cls, plan: StepPlan, first: Int32s) -> TailRows:
        """Choose rows at a position of `first` or behind it. first: int32 [requests]; 0 asks for every row."""
        skipped = np.clip(first - plan.computed_before, 0, plan.query_lens).astype(np.int32)
        starts = np.cumsum(plan.query_lens, dtype=np.int32) - plan.query_lens
        place = np.arange(plan.scheduled_tokens, dtype=np.int32) - np.repeat(
            starts, plan.query_lens
        )
        rows = np.flatnonzero(place >= np.repeat(skipped, plan.query_lens)).astype(np.int32)
        inverse = np.full(plan.scheduled_tokens, -1, dtype=np.int32)
        inverse[rows] = np.arange(len(rows), dtype=np.int32)
        return cls(rows=rows, counts=plan.query_lens - skipped, inverse=inverse)


class TailBuffers:
    """Fixed buffers of the late stage's inputs, so that a recording finds the next step's at the same addresses."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_tokens: int,
        max_requests: int,
        carried_bytes: int,
        groups: tuple[str, ...],
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._rows = zeros(max_tokens, dtype=torch.int64)
        self._token_ids, self._positions = zeros(max_tokens), zeros(max_tokens)
        self._query_starts = zeros(max_requests + 1)
        self._write_slots = {group: zeros(max_tokens, dtype=torch.int64) for group in groups}
        self._carried = zeros(max_tokens, carried_bytes, dtype=torch.uint8)
        self._max_tokens = max_tokens

    def prepare(self, tail: TailRows, context: StepContext, running_tokens: int) -> StepContext:
        """The context of a step's late stage, padded to `running_tokens` rows: a bucket, or as many as there are.

        Raises:
            TailOverflow: there are more rows than that, or the buffers are smaller.
        """
        real = len(tail.rows)
        if not real <= running_tokens <= self._max_tokens:
            raise TailOverflow(
                f"{real} tail rows were to run as {running_tokens}, in buffers of {self._max_tokens}",
                hint="late layers never run for more rows than max_num_batched_tokens",
            )
        inputs = self._fill(tail, context.inputs, running_tokens)
        shape = replace(context.shape, scheduled_tokens=real, running_tokens=running_tokens)
        attn = self._attention(tail, context.attn)
        return replace(context, shape=shape, inputs=inputs, attn=attn)

    def hand_over(self, early: Tensor, running_tokens: int) -> None:
        """Copy the rows that late layers run for. early: uint8 [tokens, carried_bytes]."""
        rows = self._rows[:running_tokens]
        torch.index_select(early, 0, rows, out=self._carried[:running_tokens])

    def carried(self, running_tokens: int) -> Tensor:
        """What was handed over: uint8 [running_tokens, carried_bytes]."""
        return self._carried[:running_tokens]

    def hand_back(self, tail: TailRows, late: Tensor, tokens: int) -> Tensor:
        """Results in the step's order, zero in rows late layers did not run for: [tokens, width]."""
        real = len(tail.rows)
        out = late.new_zeros((tokens, *late.shape[1:]))
        return out.index_copy_(0, self._rows[:real], late[:real])

    def _fill(self, tail: TailRows, step: StepInputs, running: int) -> StepInputs:
        real, requests = len(tail.rows), step.query_starts.shape[0] - 1
        starts = np.zeros(requests + 1, dtype=np.int32)
        starts[1 : len(tail.counts) + 1] = np.cumsum(tail.counts)
        starts[len(tail.counts) + 1 :] = real
        self._query_starts[: requests + 1].copy_(torch.from_numpy(starts))
        self._rows[:real].copy_(torch.from_numpy(tail.rows))
        # Rows of padding carry what the first row of the step has, and write nowhere.
        self._rows[real:running].zero_()
        rows = self._rows[:running]
        for to, of in ((self._token_ids, step.token_ids), (self._positions, step.positions)):
            torch.index_select(of, 0, rows, out=to[:running])
            to[real:running].zero_()
        return replace(
            step,
            token_ids=self._token_ids[:running],
            positions=self._positions[:running],
            query_starts=self._query_starts[: requests + 1],
            rows=self._rows_of_groups(step.rows, real, running, requests),
        )

    def _rows_of_groups(
        self, groups: Mapping[str, Rows], real: int, running: int, requests: int
    ) -> dict[str, Rows]:
        found: dict[str, Rows] = {}
        for group, slots in self._write_slots.items():
            rows = groups[group]
            torch.index_select(rows.write_slots, 0, self._rows[:running], out=slots[:running])
            slots[real:running].fill_(-1)
            found[group] = PagedBuffers(
                block_table=rows.block_table,
                lengths=rows.lengths,
                write_slots=slots,
                query_starts=self._query_starts,
                block_tokens=rows.block_tokens,
            ).view(requests, running)
        return found

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
