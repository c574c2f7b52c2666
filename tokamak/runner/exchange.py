"""What data-parallel ranks must know of each other before a step: one row of numbers per rank.

In: a plan and the reasons it cannot be recorded. Out: the rows of all ranks, equal on all of them. At dp = 1
the table is this rank's row and no collective is issued (SH-1); `group_exchange.py` carries rows between ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import IntFlag
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokamak.core.plan import StepPlan
from tokamak.graphs.ladder import Ladder

Rows = npt.NDArray[np.int32]

Switch = bool | int | float | str | None


class Demand(IntFlag):
    """Why a rank's step cannot be replayed; any rank's demand makes the step eager on all."""

    IMAGE = 1
    """Rows of an image come from an encoder."""
    ADAPTOR = 2
    """The model's adaptor vetoes this plan."""
    HOST_READ = 4
    """The forward must read a number on the host."""


NO_DEMAND = Demand(0)


def demand_names(demand: Demand) -> str:
    """The names of a set of demands, such as `image+host-read`."""
    return "+".join(str(one.name).lower().replace("_", "-") for one in demand)


class RankRow(NamedTuple):
    """One rank's row (SH-3); its fields are the columns of the gathered table."""

    seq: int
    has_work: int
    scheduled_tokens: int
    scheduled_requests: int
    prefill_rows: int
    max_query: int
    """The widest decode row."""
    eager_demand: int
    """A set of `Demand`."""
    draft_rows: int
    """Rows that propose after this step: decode rows and final chunks."""
    tail_rows: int
    """Token rows that late layers run for (GR-34); 0 of a model that always runs whole."""
    config_hash: int
    """What ladders and switches hash to, in the row that introduces a rank; 0 in rows of steps."""


COLUMNS = {name: at for at, name in enumerate(RankRow._fields)}


def rank_row(plan: StepPlan, eager_demand: Demand = NO_DEMAND, tail_rows: int = 0) -> RankRow:
    """The row of a plan. tail_rows: of its token rows, those that late layers run for."""
    decode = plan.query_lens[plan.prefill_rows :]
    # A row has at least one token.
    narrow = plan.scheduled_tokens == plan.scheduled_requests
    return RankRow(
        seq=plan.seq,
        has_work=int(plan.scheduled_requests > 0),
        scheduled_tokens=plan.scheduled_tokens,
        scheduled_requests=plan.scheduled_requests,
        prefill_rows=plan.prefill_rows,
        max_query=1 if narrow else int(decode.max(initial=1)),
        eager_demand=int(eager_demand),
        draft_rows=len(plan.sampled_rows),
        tail_rows=tail_rows,
        config_hash=0,
    )


class Exchange(Protocol):
    """Carries one row per rank and step; the one way by which numbers of a step cross ranks."""

    rank: int
    ranks: int
    last_s: float | None
    """Seconds the last exchange took; None where none was made."""

    def introduce(self, config: str) -> None:
        """Hold this rank's `config_text` against its peers'; the first of all collectives."""
        ...

    def gather_rows(self, row: RankRow) -> Rows:
        """All ranks' rows, int32 [ranks, columns]; the next call may overwrite them."""
        ...

    def vote(self, ok: bool, /) -> bool:
        """Whether every rank says ok."""
        ...


class LocalExchange:
    """The exchange of a single rank: it asks nobody."""

    def __init__(self) -> None:
        self.rank = 0
        self.ranks = 1
        self.last_s: float | None = None

    def introduce(self, config: str) -> None:
        """Nobody has other settings."""
        del config

    def gather_rows(self, row: RankRow) -> Rows:
        """This rank's row as a table, int32 [1, columns]."""
        return np.array([row], dtype=np.int32)

    def vote(self, ok: bool, /) -> bool:
        """This rank's own word."""
        return ok


def config_text(ladders: Mapping[str, Ladder], switches: Mapping[str, Switch]) -> str:
    """What must be equal on all ranks, one `name = value` a line in the order of names."""
    lines = {name: str(list(ladder.buckets)) for name, ladder in ladders.items()}
    lines |= {name: json.dumps(value) for name, value in switches.items()}
    return "\n".join(f"{name} = {lines[name]}" for name in sorted(lines))


def text_hash(text: str) -> int:
    """31 bits of a text's SHA-256, never 0."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF or 1


def config_hash(ladders: Mapping[str, Ladder], switches: Mapping[str, Switch]) -> int:
    """31 bits of the ladders and switches, equal in every process that has the same, never 0."""
    return text_hash(config_text(ladders, switches))
