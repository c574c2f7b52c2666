"""How a settled step runs the model: from a recording of one of the kinds of graph, or eagerly.

A step with prefill rows of a model in two stages runs in these (`stages.py`); every other runs whole.
"""

from __future__ import annotations

from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepShape
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.attention.tail import TailBuffers
from tokamak.layers.model import Model
from tokamak.runner.stages import StagedEager, StagedForward, eagerly


class EagerForward:
    """Runs the model operator by operator; what a replay must equal. `staged` is None for a model without stages."""

    def __init__(self, model: Model, staged: StagedEager | None) -> None:
        self.model, self.staged = model, staged

    @property
    def tail_buffers(self) -> TailBuffers | None:
        """Where early layers hand over to late ones, if they do."""
        return None if self.staged is None else self.staged.buffers

    def __call__(self, context: StepContext) -> Tensor | None:
        """Hidden states of all running token rows, [tokens, width]; None where late layers run for none."""
        if self.staged is not None and runs_staged(context.shape):
            return self.staged(context)
        return eagerly(self.model, context)


class Forward:
    """Runs the model over a step. `eager_pad` runs token buckets eagerly, at their size and padding (GR-29)."""

    def __init__(
        self,
        eager: EagerForward,
        *,
        requests: ReqGraph,
        tokens: TokenGraph,
        decoder: DecoderGraph,
        eager_pad: bool,
    ) -> None:
        self.eager = eager
        self._staged: StagedForward | None = None
        if eager.staged is not None:
            self._staged = StagedForward(
                eager.staged, tokens=tokens, decoder=decoder, eager_pad=eager_pad
            )
        self._requests = requests
        self._tokens = tokens
        self._eager_pad = eager_pad

    def run(self, context: StepContext) -> Tensor | None:
        """As `EagerForward`, from recordings where the step's shape says so."""
        shape = context.shape
        if self._staged is not None and runs_staged(shape):
            return self._staged.run(context)
        match shape.mode:
            case Mode.REQUEST_GRAPH:
                return self._requests.replay(_key(shape), context)
            case Mode.TOKEN_GRAPH if not self._eager_pad:
                return self._tokens.replay(shape.running_tokens, context)
            case _:
                return self.eager(context)

    def left_by_tokens(self, context: StepContext) -> Tensor:
        """What a token bucket leaves in its outlet: hidden states, or what early layers leave."""
        staged = self.eager.staged
        return eagerly(self.eager.model, context) if staged is None else staged.early(context)

    def record_requests(self, context: StepContext) -> RequestKey:
        """Record a request bucket at the size of a step; returns its key."""
        key = _key(context.shape)
        self._requests.record(key, self.eager.model, context)
        return key

    def record_tokens(self, context: StepContext) -> None:
        """Record a token bucket at the size of a step: the whole forward, or its early stage."""
        if self._staged is not None:
            self._staged.record_early(context)
        else:
            self._tokens.record(context.shape.running_tokens, self.eager.model, context)

    def record_late(self, context: StepContext) -> None:
        """Record a bucket of tail rows at the size of a step's tail."""
        assert self._staged is not None, "a model without stages has no late layers"
        self._staged.record_late(context)


def runs_staged(shape: StepShape) -> bool:
    """Whether a step is one of those that models with stages run in these; steps of decode rows are not (GR-33)."""
    return shape.q_width == 0


def _key(shape: StepShape) -> RequestKey:
    return RequestKey(shape.running_requests, shape.q_width)
