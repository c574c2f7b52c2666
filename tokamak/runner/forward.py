"""How a settled step runs the model: from a recording of one of the two kinds of graph, or eagerly."""

from __future__ import annotations

from torch import Tensor

from tokamak.core.context import StepContext, installed
from tokamak.core.plan import Mode
from tokamak.graphs.region import begin_forward
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.graphs.token_graph import TokenGraph
from tokamak.layers.model import Model


class Forward:
    """Runs the model over a step. `eager_pad` runs token buckets eagerly, at their size and padding (GR-29)."""

    def __init__(
        self, model: Model, *, requests: ReqGraph, tokens: TokenGraph, eager_pad: bool
    ) -> None:
        self.model = model
        self._requests = requests
        self._tokens = tokens
        self._eager_pad = eager_pad

    def run(self, context: StepContext) -> Tensor:
        """Hidden states of all running token rows, [tokens, width]."""
        shape = context.shape
        match shape.mode:
            case Mode.REQUEST_GRAPH:
                key = RequestKey(shape.running_requests, shape.q_width)
                return self._requests.replay(key, context)
            case Mode.TOKEN_GRAPH if not self._eager_pad:
                return self._tokens.replay(shape.running_tokens, context)
            case _:
                return self.eager(context)

    def eager(self, context: StepContext) -> Tensor:
        """The same rows, operator by operator; what a replay must equal."""
        with installed(context):
            begin_forward(context)
            return self.model(context.inputs)
