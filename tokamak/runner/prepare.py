"""In which order is a step prepared? Inputs first, then what depends on the step before, then the context.

Nothing before the fill may depend on how many drafts the previous step accepted: that is still being computed
while the host works here. Waiting for it comes after, and only for models that need it on the host.
"""

from __future__ import annotations

from dataclasses import replace

from tokamak.core.context import StepContext, Streams
from tokamak.core.plan import Int32s, StepPlan, StepShape
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.attention.tail import TailBuffers
from tokamak.layers.model import Model
from tokamak.runner.inputs import InputArena
from tokamak.runner.pads import PadWatch
from tokamak.runner.previous import Previous
from tokamak.runner.shape import RunningTable
from tokamak.runner.status import of_rows
from tokamak.runner.tails import Tails
from tokamak.telemetry.spans import Spans


class Preparation:
    """A plan and its shape become an installed-ready StepContext; real, dummy and recorded steps alike."""

    def __init__(
        self,
        model: Model,
        *,
        inputs: InputArena,
        attention: AttnBuilder,
        previous: Previous,
        table: RunningTable,
        late_table: RunningTable,
        streams: Streams,
        pads: PadWatch,
        spans: Spans,
        tails: Tails,
        tail_buffers: TailBuffers | None,
    ) -> None:
        """tail_buffers: None for a model that always runs whole."""
        self._model = model
        self._inputs = inputs
        self._attention = attention
        self._previous = previous
        self._table = table
        self._late_table = late_table
        self._streams = streams
        self._pads = pads
        self._spans = spans
        self._tails = tails
        self._tail_buffers = tail_buffers

    def untimed(self) -> Preparation:
        """The same parts for contexts of recordings and their checks: their time is no step's."""
        return Preparation(
            self._model,
            inputs=self._inputs,
            attention=self._attention,
            previous=self._previous,
            table=self._table,
            late_table=self._late_table,
            streams=self._streams,
            pads=self._pads,
            spans=Spans(),
            tails=self._tails,
            tail_buffers=self._tail_buffers,
        )

    def prepare(self, plan: StepPlan, shape: StepShape) -> StepContext:
        """The fixed order (PREP-1)."""
        span = self._spans.span
        self._previous.begin()
        late = shape.late
        tail = None if late is None else self._tails.rows(plan)
        with span("stage"):
            self._inputs.stage(plan, shape)
            if late is not None and tail is not None:
                self._inputs.stage_tail(tail, late.running_tokens)
        with span("publish"):
            self._inputs.publish()
        with span("fill"):
            inputs = self._inputs.fill(plan, shape)
            self._previous.launched()
        rejected: Int32s | None = None
        if self._model.needs_status:
            with span("wait_status"):
                status, rows = self._previous.take(plan)
                rejected = of_rows(status.rejected, rows)
        with span("attn"):
            attn = self._attention.prepare(plan, shape, inputs, rejected)
        with span("install"):
            self._pads.prepare(shape)
            context = StepContext(
                shape=shape,
                inputs=inputs,
                attn=attn,
                running_table=self._table.view,
                layers=self._model.layers,
                streams=self._streams,
                pad_value=self._pads.value,
                late=None,
            )
            if late is None or tail is None:
                return context
            assert self._tail_buffers is not None, "a model without stages has no tail"
            behind = self._tail_buffers.prepare(tail, context, late)
            behind = replace(behind, running_table=self._late_table.view)
            return replace(context, late=behind)
