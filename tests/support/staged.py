"""Steps of a model in two stages, made by hand: eagerly, padded to buckets, or from recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tests.support.steps import ModelDriver, a_context
from tokamak.cache.groups import first_late
from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext
from tokamak.core.plan import Grants, Mode, StepPlan
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.sim import SimBackend
from tokamak.graphs.streams import SideStreams
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.attention.tail import TailBuffers, TailRows
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41
from tokamak.runner.shape import lone_late
from tokamak.runner.stages import StagedEager, StagedForward

How = Literal["eager", "eager_pad", "replay"]
CPU = torch.device("cpu")
REQUESTS = 8


class StagedDriver(ModelDriver):
    """Runs prompts whose length it is told in two stages; buckets are those of both graphs."""

    def __init__(
        self,
        model: DeepseekV41,
        *,
        how: How = "eager",
        buckets: Sequence[int] = (8, 32, 96),
        blocks: int = 64,
        block_tokens: int = 4,
    ) -> None:
        super().__init__(model, blocks=blocks, block_tokens=block_tokens)
        stages = model.stages()
        assert stages is not None, f"{type(model).__name__} has no stages"
        self.stages, self.how, self.late_rows = stages, how, 0
        self._width = model.config.shared.width
        self._buckets = Ladder(tuple(buckets))
        most, streams, buffers = max(buckets), SideStreams(CPU), StaticBuffers()

        def backend() -> SimBackend:
            return SimBackend(CPU)

        ladder = Ladder(()) if how == "eager" else self._buckets
        self.tokens = TokenGraph(
            "prefill", ladder, backend, stages.early_regions(), streams, buffers
        )
        self.decoder = DecoderGraph(
            "tail", ladder, backend, stages.late_regions(), streams, buffers
        )
        self._token_ids = torch.zeros(most, dtype=torch.int32)
        self._positions = torch.zeros(most, dtype=torch.int32)
        self._buffers = PagedBuffers(
            block_table=torch.zeros((REQUESTS, blocks), dtype=torch.int32),
            lengths=torch.zeros(REQUESTS, dtype=torch.int32),
            write_slots=torch.zeros(most, dtype=torch.int64),
            query_starts=torch.zeros(REQUESTS + 1, dtype=torch.int32),
            block_tokens=block_tokens,
        )
        self._tail_rows = np.zeros(most, dtype=np.int32)
        self._tail_starts = np.zeros(REQUESTS + 1, dtype=np.int32)
        self._tail_first = np.zeros(REQUESTS, dtype=np.int32)
        self._tail_buffers = TailBuffers(
            torch.from_numpy(self._tail_rows),
            torch.from_numpy(self._tail_starts),
            window_starts=torch.from_numpy(self._tail_first) if stages.bounded else None,
            groups=dict.fromkeys(self._groups, self._buffers),
            carried_rows=most,
            carried_bytes=stages.carried_bytes,
        )
        self._forward = StagedForward(
            StagedEager(stages, self._tail_buffers),
            tokens=self.tokens,
            decoder=self.decoder,
            eager_pad=how == "eager_pad",
        )
        if how == "replay":
            self._record()

    def staged(
        self, work: Mapping[str, Sequence[int]], prompt_tokens: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Run some tokens of prompts of those lengths (0: all rows); returns hidden states of every row."""
        names = sorted(work, key=lambda name: len(work[name]) == 1)
        chunks = [self._chunk(name, work[name]) for name in names]
        lens = [len(work[name]) for name in names]
        prefill_rows = sum(length > 1 for length in lens)
        bucket = None if self.how == "eager" else self._buckets.ceil(sum(lens))
        running = sum(lens) if bucket is None else bucket
        context = a_context(
            chunks,
            block_tokens=self.block_tokens,
            groups=self._groups,
            padding=running - sum(lens),
            layers=self.model.layers,
        )
        plan = StepPlan(
            seq=0,
            request_ids=tuple(names),
            slots=np.arange(1, len(names) + 1, dtype=np.int32),
            query_lens=np.array(lens, dtype=np.int32),
            computed_before=np.array([chunk.computed for chunk in chunks], dtype=np.int32),
            prefill_rows=prefill_rows,
            final_chunk=np.zeros(len(names), dtype=np.bool_),
            admissions=(),
            grants=Grants.none(),
        )
        late = self.stages.late_tokens
        first = [first_late(prompt_tokens.get(name, 0), late) for name in names]
        tail = TailRows.of(plan, np.array(first, dtype=np.int32))
        self.late_rows += len(tail.rows)
        with torch.inference_mode():
            hidden = self._forward.run(self._with_tail(self._fixed(context), tail))
        if hidden is None:
            hidden = torch.zeros(sum(lens), 1)
        return dict(zip(names, hidden[: sum(lens)].clone().split(lens), strict=True))

    def _fixed(self, context: StepContext) -> StepContext:
        """The same step, with what segments read where it always is."""
        inputs, count = context.inputs, context.shape.running_tokens
        self._token_ids[:count] = inputs.token_ids
        self._positions[:count] = inputs.positions
        rows, buffers = inputs.rows[self._groups[0]], self._buffers
        requests, blocks = rows.block_table.shape
        buffers.block_table[:requests, :blocks] = rows.block_table
        buffers.block_table[:requests, blocks:] = 0
        buffers.lengths[:requests] = rows.lengths
        buffers.write_slots[:count] = rows.write_slots
        buffers.query_starts[: requests + 1] = inputs.query_starts
        view = buffers.view(requests, count)
        inputs = replace(
            inputs,
            token_ids=self._token_ids[:count],
            positions=self._positions[:count],
            rows=dict.fromkeys(self._groups, view),
        )
        mode = Mode.EAGER if self.how == "eager" else Mode.TOKEN_GRAPH
        return replace(context, inputs=inputs, shape=replace(context.shape, mode=mode))

    def _with_tail(self, context: StepContext, tail: TailRows) -> StepContext:
        """The same step with its late forward, if that has rows."""
        real, requests = len(tail.rows), context.shape.running_requests
        if not real:
            return context
        bucket = None if self.how == "eager" else self._buckets.ceil(real)
        mode = Mode.EAGER if bucket is None else Mode.TOKEN_GRAPH
        late = lone_late(mode, real, bucket or real)
        tail.stage(
            self._tail_rows[: late.running_tokens],
            self._tail_starts[: requests + 1],
            self._tail_first[:requests],
        )
        return replace(context, late=self._tail_buffers.prepare(tail, context, late))

    def _record(self) -> None:
        most = max(self._buckets.buckets)
        width = self.stages.carried_bytes
        self.tokens.open_outlets(torch.empty((1, width), dtype=torch.uint8), most)
        with torch.inference_mode():
            for bucket in reversed(self._buckets.buckets):
                chunk = self._chunk("recorded", [1] * bucket)
                context = self._fixed(
                    a_context(
                        [chunk],
                        block_tokens=self.block_tokens,
                        groups=self._groups,
                        layers=self.model.layers,
                    )
                )
                self._forward.record_early(context)
                rows = np.arange(bucket, dtype=np.int32)
                counts = np.array([bucket], dtype=np.int32)
                tail = TailRows(rows=rows, counts=counts, first=0 * counts)
                if bucket == most:
                    hidden = torch.empty((1, self._width))
                    self.decoder.open_outlets(hidden, most)
                self._forward.record_late(self._with_tail(context, tail))
        self._free.extend(self._blocks.pop("recorded"))
        self._known.pop("recorded")
