"""In which order requests are served, how a prompt is cut, and who gives way.

Integers only. The scheduler asks these questions; the answers hold no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tokamak.core.request import Request

PolicyName = Literal["fcfs", "priority"]

Order = Callable[[Request], tuple[int, int]]


def serving_order(policy: PolicyName) -> Order:
    """A sort key: smaller is served first. Under `priority` a lower number beats an earlier arrival."""
    if policy == "priority":
        return lambda request: (request.priority, request.arrival_order)
    return lambda request: (0, request.arrival_order)


def chunk_tokens(remaining: int, budget: int) -> int:
    """How many prompt tokens to run now: as many as the step has room for."""
    return min(remaining, budget)


def victim(running: Sequence[Request], order: Order) -> Request:
    """Who gives up its blocks when none are free: the one that would be served last."""
    return max(running, key=order)


def spare_blocks(running_requests: int, preemptions: int) -> int:
    """Blocks that must stay free when a request is admitted, so that admission does not thrash.

    Each running request may need a block soon. A request that was preempted before waits for more room
    each time, so it is computed again only a few times however tight the pool is.
    """
    return running_requests * (1 + preemptions)
