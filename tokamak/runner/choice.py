"""How does a decode step whose rows all want the likeliest token get them? Recorded, behind the forward.

Scores, the likeliest token of each row, its place in the history and what travels to the host are one recording per
request bucket: a `ReqGraph` of its own that reads the outlet of the forward's. Steps with any other wish sample from
the same outlet, op by op.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.inputs import StepInputs
from tokamak.graphs.request_graph import ReqGraph, RequestKey
from tokamak.runner.inputs import InputArena
from tokamak.sampling.scan import LikeliestRows

COLUMNS = 2
"""Of what a row leaves with: its token id, and the bits of its score in float32."""


class PlainChoice:
    """The recordings of the choice. `find` is the bound op `argmax_rows`."""

    def __init__(
        self,
        graph: ReqGraph,
        *,
        forward: ReqGraph,
        logits: Callable[[Tensor], Tensor],
        find: LikeliestRows,
        inputs: InputArena,
    ) -> None:
        self.graph = graph
        self._forward = forward
        self._logits = logits
        self._find = find
        self._inputs = inputs

    def record(self, key: RequestKey, context: StepContext) -> None:
        """Record a bucket whose forward is recorded."""
        hidden = self._forward.outlet(key)
        slots, positions = self._inputs.sampled_rows(key.requests)

        def choose(step: StepInputs) -> Tensor:
            del step
            token_ids, peaks = self._find(self._logits(hidden))
            token_ids = token_ids.int()
            self._inputs.remember(slots, positions, token_ids)
            return torch.stack((token_ids, peaks.view(torch.int32)), dim=1)

        self.graph.record(key, choose, context)

    def open_outlets(self, rows: int) -> None:
        """Make the buffer that chosen tokens leave through; before any recording."""
        like = self._inputs.history.new_empty((0, COLUMNS))
        self.graph.open_outlets(like, rows)

    def replay(self, context: StepContext) -> Tensor | None:
        """Ids and score bits of the step's real rows, int32 [scheduled requests, 2]; None if not recorded.

        The tokens are in the history already.
        """
        shape = context.shape
        key = RequestKey(shape.running_requests, shape.q_width)
        if key not in self.graph:
            return None
        return self.graph.replay(key, context)[: shape.scheduled_requests]
