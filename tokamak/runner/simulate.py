"""What would a start take? Every size of one, without weights, caches or recordings.

The model is built without its weights and its sizes come from the functions a real start calls: `plan_rank`, with
`plan_start` and `graph_pool_estimate` below it, and `recordable_ladders`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokamak.config.engine import EngineConfig
from tokamak.graphs.ladder import Ladder
from tokamak.runner.assemble import plan_rank
from tokamak.runner.memory import StartPlan
from tokamak.runner.wiring import recordable_ladders


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStart:
    """The sizes of a start, and what of its ladders would be recorded."""

    start: StartPlan
    request_ladder: Ladder
    token_ladder: Ladder
    late_ladder: Ladder
    off: dict[str, str]
    """Graphs that would record nothing, by name, and why."""


def simulate_start(config: EngineConfig) -> SimulatedStart:
    """Plan a start as `assemble` does, and stop before anything is read or allocated.

    Raises:
        ModelError: the checkpoint's config is unsound, or of a kind we do not implement.
        OptionError: the cache cannot hold one request of max_model_len, or recordings leave it no room.
    """
    planned = plan_rank(config)
    recordable = recordable_ladders(planned.start, planned.build, planned.model)
    return SimulatedStart(
        start=planned.start,
        request_ladder=recordable.requests,
        token_ladder=recordable.tokens,
        late_ladder=recordable.late,
        off=recordable.off,
    )
