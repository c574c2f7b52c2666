"""In which order is a step prepared? Inputs first, then what depends on the step before, then the context.

Nothing before the fill may depend on how many drafts the previous step accepted: that is still being computed
while the host works here. Waiting for it comes after, and only for models that need it on the host.
"""

from __future__ import annotations

from tokamak.core.context import StepContext, Streams
from tokamak.core.plan import Int32s, StepPlan, StepShape
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.model import Model
from tokamak.runner.inputs import InputArena
from tokamak.runner.pads import PadWatch
from tokamak.runner.previous import Previous
from tokamak.runner.shape import RunningTable
from tokamak.runner.status import of_rows
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
        streams: Streams,
        pads: PadWatch,
        spans: Spans,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._attention = attention
        self._previous = previous
        self._table = table
        self._streams = streams
        self._pads = pads
        self._spans = spans

    def untimed(self) -> Preparation:
        """The same parts for contexts of recordings and their checks: their time is no step's."""
        return Preparation(
            self._model,
            inputs=self._inputs,
            attention=self._attention,
            previous=self._previous,
            table=self._table,
            streams=self._streams,
            pads=self._pads,
            spans=Spans(),
        )

    def prepare(self, plan: StepPlan, shape: StepShape) -> StepContext:
        """The fixed order (PREP-1)."""
        span = self._spans.span
        self._previous.begin()
        with span("stage"):
            self._inputs.stage(plan, shape)
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
            return StepContext(
                shape=shape,
                inputs=inputs,
                attn=attn,
                running_table=self._table.view,
                layers=self._model.layers,
                streams=self._streams,
                pad_value=self._pads.value,
            )
