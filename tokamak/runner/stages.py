"""How does a step with prefill rows run a model in two stages? Early layers for all rows, late ones for the tail."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokamak.core.context import StepContext, installed
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Mode
from tokamak.graphs.region import begin_forward
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.attention.tail import TailBuffers
from tokamak.layers.stages import Stages


class StagedEager:
    """Runs both stages one after the other, operator by operator."""

    def __init__(self, stages: Stages, buffers: TailBuffers) -> None:
        self.stages, self.buffers = stages, buffers

    def __call__(self, context: StepContext) -> Tensor | None:
        """Hidden states of all running token rows, zero where late layers were cut; None where all of them were."""
        early = self.early(context)
        late = context.late
        if late is None:
            return None
        hidden = self.late(early, late)
        return self.buffers.hand_back(hidden, late, context.shape.running_tokens)

    def early(self, context: StepContext) -> Tensor:
        """What early layers leave of all rows: uint8 [tokens, carried_bytes]."""
        return eagerly(self.stages.early, context)

    def late(self, early: Tensor, late: StepContext) -> Tensor:
        """Hidden states of the tail's rows: [running tail rows, width]."""
        carried = self.buffers.gather(early, late)
        return eagerly(lambda step: self.stages.late(carried, step), late)


class StagedForward:
    """The same with each stage from its graph where the step's shape says so.

    With `eager_pad`, both run eagerly at the sizes of their buckets (GR-29).
    """

    def __init__(
        self, eager: StagedEager, *, tokens: TokenGraph, decoder: DecoderGraph, eager_pad: bool
    ) -> None:
        self.eager = eager
        self._tokens, self._decoder = tokens, decoder
        self._eager_pad = eager_pad

    def run(self, context: StepContext) -> Tensor | None:
        """As `StagedEager`; results of graphs are in their outlets until the next run."""
        shape, late, buffers = context.shape, context.late, self.eager.buffers
        if self._replays(context):
            early = self._tokens.replay(shape.running_tokens, context)
        else:
            early = self.eager.early(context)
        if late is None:
            return None
        if self._replays(late):
            buffers.hand_over(early, late)
            hidden = self._decoder.replay(late.shape.running_tokens, late)
        else:
            hidden = self.eager.late(early, late)
        return buffers.hand_back(hidden, late, shape.running_tokens)

    def record_early(self, context: StepContext) -> None:
        """Record the early stage at the size of a step's rows."""
        self._tokens.record(context.shape.running_tokens, self.eager.stages.early, context)

    def record_late(self, context: StepContext) -> None:
        """Record the late stage at the size of a step's tail, over what its early stage leaves."""
        late = context.late
        assert late is not None, "a recording of late layers needs a tail"
        self.eager.buffers.hand_over(self.eager.early(context), late)
        self._decoder.record(late.shape.running_tokens, self._late, late)

    def _replays(self, context: StepContext) -> bool:
        return context.shape.mode is Mode.TOKEN_GRAPH and not self._eager_pad

    def _late(self, step: StepInputs) -> Tensor:
        carried = self.eager.buffers.carried(step.positions.shape[0])
        return self.eager.stages.late(carried, step)


def eagerly(forward: Callable[[StepInputs], Tensor], context: StepContext) -> Tensor:
    """Run a forward over a step, operator by operator."""
    with installed(context):
        begin_forward(context)
        return forward(context.inputs)
