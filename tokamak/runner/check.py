"""Is a replay what the eager forward gives? Asked of some steps while serving, and counted.

The eager forward runs again over the step's own inputs, padding included: it writes the same rows to the caches.
What differs is reported, and the step goes on with the eager result.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepShape

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 2.0**-14
"""Relative to the largest number of the row, in float32 on a CPU where the forward ran at another size: kernels of
ours give each row the same sums at every size, PyTorch's matrix products and its attention need not."""

TOLERANCE = 2.0**-5
"""Relative to the largest number of the row, where sums have no fixed order; at the same padding."""

OTHER_SIZE_TOLERANCE = 2.0**-3
"""Where the forward ran at another size, and so perhaps with other kernels in every layer."""


def worst_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two [rows, width] tensors, relative to the largest number of its row; inf for NaN."""
    if not expected.numel():
        return 0.0
    gap = (found.double() - expected.double()).abs().amax(dim=1)
    size = expected.double().abs().amax(dim=1).clamp(min=1e-30)
    worst = float((gap / size).max())
    return float("inf") if worst != worst else worst


def allowed_difference(hidden: Tensor, *, same_size: bool) -> float:
    """None in float32 on a CPU at the same size, where every sum has its order; rounding elsewhere."""
    if hidden.dtype == torch.float32 and hidden.device.type == "cpu":
        return 0.0 if same_size else FLOAT32_TOLERANCE
    return TOLERANCE if same_size else OTHER_SIZE_TOLERANCE


class ReplayCheck:
    """Compares replayed steps with `eager`: the `first` of every bucket and a share `rate` of all.

    They are the same steps on every rank.
    """

    def __init__(
        self, eager: Callable[[StepContext], Tensor | None], *, rate: float, first: int
    ) -> None:
        self._eager = eager
        self._every = round(1 / rate) if rate else 0
        self._first = first
        self._replays: Counter[tuple[Mode, int, int]] = Counter()
        self.checks = 0
        self.failures = 0

    def passed(self, hidden: Tensor | None, seq: int, context: StepContext) -> Tensor | None:
        """The step's hidden states [tokens, width]: the replay's, or the eager ones where they differ.

        None of a step that has none, whose early layers leave nothing to compare.
        """
        shape = context.shape
        if hidden is None or not _is_replayed(shape) or not self._is_due(seq, shape):
            return hidden
        self.checks += 1
        replayed = hidden[: shape.scheduled_tokens].clone()
        expected = self._eager(context)
        assert expected is not None, "the eager forward has a result where the replay has one"
        worst = worst_difference(replayed, expected[: shape.scheduled_tokens])
        if worst <= allowed_difference(expected, same_size=True):
            return hidden
        self.failures += 1
        logger.error(
            "Step %s replayed %s of %s requests and %s tokens with other numbers than the eager forward "
            "(%.3g of the row's largest); the eager ones are used. Start with graphs=off, or find the bucket "
            "with verify_graphs=true.",
            seq,
            shape.mode,
            shape.running_requests,
            shape.running_tokens,
            worst,
        )
        return expected

    def _is_due(self, seq: int, shape: StepShape) -> bool:
        if self._every and seq % self._every == 0:
            return True
        late = 0 if shape.late is None else shape.late.running_tokens
        bucket = (shape.mode, shape.running_tokens, late)
        if self._replays[bucket] >= self._first:
            return False
        self._replays[bucket] += 1
        return True


def _is_replayed(shape: StepShape) -> bool:
    late = shape.late
    return shape.mode is not Mode.EAGER or (late is not None and late.mode is not Mode.EAGER)
