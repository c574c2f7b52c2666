"""How does a step with prefill rows run a model in two stages? Early layers for all rows, late ones for the tail."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokamak.core.context import StepContext, installed
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Mode
from tokamak.graphs.region import begin_forward
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.attention.tail import TailBuffers, TailRows
from tokamak.layers.stages import Stages


class StagedForward:
    """Runs both stages one after the other, each from its graph or eagerly.

    With `eager_pad`, both run eagerly at the sizes of their buckets.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        tokens: TokenGraph,
        decoder: DecoderGraph,
        buffers: TailBuffers,
        eager_pad: bool = False,
    ) -> None:
        self._stages = stages
        self._tokens, self._decoder = tokens, decoder
        self._buffers, self._eager_pad = buffers, eager_pad

    def run(self, context: StepContext, tail: TailRows) -> Tensor | None:
        """Hidden states of all running token rows, zero where late layers were cut; None where all of them were."""
        shape, real = context.shape, len(tail.rows)
        if shape.mode is Mode.TOKEN_GRAPH and not self._eager_pad:
            early = self._tokens.replay(shape.running_tokens, context)
        else:
            early = _eagerly(self._stages.early, context)
        if not real:
            return None
        ladder = self._decoder.ladder
        bucket = self._decoder.bucket(real)
        if self._eager_pad:
            bucket = ladder.ceil(real)
        running = real if bucket is None else bucket
        late = self._buffers.prepare(tail, context, running)
        self._buffers.hand_over(early, running)
        if bucket is None or self._eager_pad:
            hidden = _eagerly(self._late, late)
        else:
            hidden = self._decoder.replay(bucket, late)
        return self._buffers.hand_back(tail, hidden, shape.running_tokens)

    def record_early(self, context: StepContext) -> Tensor:
        """Record the early stage at the size of a step's rows; returns the outlet."""
        return self._tokens.record(context.shape.running_tokens, self._stages.early, context)

    def record_late(self, bucket: int, context: StepContext, tail: TailRows) -> Tensor:
        """Record the late stage at a bucket of tail rows, over what was handed over last; returns the outlet."""
        return self._decoder.record(
            bucket, self._late, self._buffers.prepare(tail, context, bucket)
        )

    def _late(self, step: StepInputs) -> Tensor:
        carried = self._buffers.carried(step.positions.shape[0])
        return self._stages.late(carried, step)


def _eagerly(forward: Callable[[StepInputs], Tensor], context: StepContext) -> Tensor:
    with installed(context):
        begin_forward(context)
        return forward(context.inputs)
