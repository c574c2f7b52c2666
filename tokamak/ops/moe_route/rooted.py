"""Routing by the square root of a softplus, in plain PyTorch (DeepSeek V4 and V4.1).

A bias balances the experts' load: it decides who is chosen and never how much they weigh.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op
from tokamak.ops.whole_rows import whole_rows

SMALLEST_SUM = 1e-20
"""Added to the sum of a row's weights, so that a row of zeros stays finite."""


@op
def moe_route_rooted(
    scores: Tensor, bias: Tensor, chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the `chosen` experts of each row that sqrt(softplus(score)) + bias ranks highest; of equals the lower.

    scores: [rows, experts] float32. bias: [experts] float32. Returns expert ids, int32 [rows, chosen], and weights,
    float32 [rows, chosen]: shares of the chosen among themselves without the bias, times `scale`. A row that is not
    a number gets ids in range.
    """
    ranked = (_root(scores) + bias).sort(dim=-1, descending=True, stable=True)
    ids = ranked.indices[:, :chosen]
    return ids.int(), _weights(scores, ids, scale)


@op
def moe_weigh_rooted(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weights of experts that were chosen by other means, such as a table of token ids.

    scores: [rows, experts] float32. ids: int32 [rows, chosen]. Returns float32 [rows, chosen], as `moe_route_rooted`.
    """
    return _weights(scores, ids.long(), scale)


def _root(scores: Tensor) -> Tensor:
    # softplus's threshold would be exact to float32 only above 20, where log1p(exp(-x)) is below half a unit.
    whole = whole_rows(scores.float())
    return functional.softplus(whole, threshold=20.0).sqrt()[: scores.shape[0]]


def _weights(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    found = _root(scores).gather(1, ids)
    return found / (found.sum(dim=-1, keepdim=True) + SMALLEST_SUM) * scale
