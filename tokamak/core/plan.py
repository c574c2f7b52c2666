"""A step on the host: what the scheduler chose, the settled size, and what came back.

Integers only (numpy); the same bytes on every rank of a replica. All types are frozen; an absent thing
is an explicit None or an empty tuple, never a default that means "not set".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from tokamak.core.request import SamplingParams

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that takes a slot in this step; everything a rank must know of it."""

    request_id: str
    slot: int
    token_ids: Int32s
    """Known tokens: the prompt and, after a preemption, the output so far. int32 [known]."""
    prompt_tokens: int
    params: SamplingParams
    sibling: int
    max_tokens: int
    stop_ids: frozenset[int]
    scored_tokens: int
    """Prompt log-probabilities already delivered, before a preemption."""
    first_late: int
    """The first known token that late layers run for (`layers/stages.py`); 0 where they run for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrant:
    """Blocks appended to a slot's block table of one cache group, from entry `start` on."""

    slot: int
    group: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """All blocks a plan grants, one element each; no entry of a slot is granted twice."""

    groups: Int32s  # [granted] cache group
    slots: Int32s  # [granted]
    entries: Int32s  # [granted] place in the slot's block table
    block_ids: Int32s  # [granted]

    def __len__(self) -> int:
        return len(self.block_ids)

    @staticmethod
    def none() -> Grants:
        """No blocks."""
        return NO_GRANTS

    @staticmethod
    def of(grants: Iterable[BlockGrant]) -> Grants:
        """The blocks of some grants, in order."""
        blocks = [
            (grant.group, grant.slot, entry, block_id)
            for grant in grants
            for entry, block_id in enumerate(grant.block_ids, grant.start)
        ]
        if not blocks:
            return NO_GRANTS
        groups, slots, entries, block_ids = np.array(blocks, dtype=np.int32).T.copy()
        return Grants(groups=groups, slots=slots, entries=entries, block_ids=block_ids)


_EMPTY = np.zeros(0, dtype=np.int32)
NO_GRANTS = Grants(groups=_EMPTY, slots=_EMPTY, entries=_EMPTY, block_ids=_EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the scheduler put in one step. Rows [0, prefill_rows) are prefill, the rest decode."""

    seq: int
    request_ids: tuple[str, ...]
    slots: Int32s  # [rows]
    query_lens: Int32s  # [rows]
    computed_before: Int32s  # [rows] tokens already in the caches
    prefill_rows: int
    final_chunk: Bools  # [rows] prefill rows after which a token is sampled; False for decode rows
    admissions: tuple[Admission, ...]
    grants: Grants
    # What follows is derived, once, as several parts of a step ask for it.
    scheduled_requests: int = field(init=False)
    """Request rows of this step."""
    scheduled_tokens: int = field(init=False)
    """Token rows of this step."""
    lengths: Int32s = field(init=False)  # [rows]
    """Tokens of each request once the step has run."""
    longest_tokens: int = field(init=False)
    """The most of these; 0 without rows."""
    sampled_rows: Int32s = field(init=False)  # [sampled]
    """Request rows that get a token: final prefill chunks, then decode rows."""

    def __post_init__(self) -> None:
        """Derive what the given fields imply."""
        rows, prefill = len(self.request_ids), self.prefill_rows
        sampled = np.arange(prefill, rows, dtype=np.int32)
        if prefill:
            finals = np.flatnonzero(self.final_chunk[:prefill]).astype(np.int32)
            sampled = np.concatenate([finals, sampled])
        lengths = self.computed_before + self.query_lens
        derive = object.__setattr__
        derive(self, "scheduled_requests", rows)
        derive(self, "scheduled_tokens", int(self.query_lens.sum()))
        derive(self, "lengths", lengths)
        derive(self, "longest_tokens", int(lengths.max(initial=0)))
        derive(self, "sampled_rows", sampled)

    @staticmethod
    def empty(seq: int) -> StepPlan:
        """A rank's that has no work of its own and takes part in its peers' step."""
        return StepPlan(
            seq=seq,
            request_ids=(),
            slots=_EMPTY,
            query_lens=_EMPTY,
            computed_before=_EMPTY,
            prefill_rows=0,
            final_chunk=np.zeros(0, dtype=np.bool_),
            admissions=(),
            grants=NO_GRANTS,
        )


class Mode(StrEnum):
    """How the forward of a step runs."""

    REQUEST_GRAPH = "request_graph"
    TOKEN_GRAPH = "token_graph"
    EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """Where a step divides into two batches (two-batch overlap)."""

    total: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LateShape:
    """How late layers run in a step with prefill rows: for the newest rows of prompts and all decode rows."""

    mode: Mode
    """TOKEN_GRAPH, from a recording of tail rows, or EAGER."""
    scheduled_tokens: int
    """Tail rows of this rank's plan."""
    running_tokens: int
    wanted: int | None
    """The bucket that would hold the rows of the group and is not recorded; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The settled size of a step: what this rank runs, equal where it must be on all ranks."""

    mode: Mode
    dummy: bool
    scheduled_requests: int
    scheduled_tokens: int
    running_requests: int
    running_tokens: int
    q_width: int
    """Tokens per decode row in a uniform decode step; 0 in steps with prefill rows."""
    cut: BatchCut | None
    uniform_rows: bool
    """Whether every data-parallel rank runs the same number of token rows."""
    draft_requests: int
    """Request rows every rank's draft runs after this step; 0 where no rank drafts."""
    why: str
    """A short reason code, such as `bucket` or `eager:above-ladder`."""
    wanted: int | None
    """The bucket that would hold an `eager:not-recorded` step, equal on all ranks; else None."""
    late: LateShape | None
    """None where no rank runs late layers on their own: in steps of decode rows, and where no tail has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one position: the chosen token first, then the most likely ones."""

    token_ids: Int32s  # [1 + top]
    logprobs: npt.NDArray[np.float32]  # [1 + top]
    rank: int
    """How many tokens are at least as likely as the chosen one, 1 for the most likely."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request got from a step.

    Every row of every step makes one: a struct that the garbage collector need not look at, as it is in no cycle.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Sampled tokens; empty for a prefill chunk that is not final."""
    logprobs: tuple[TokenLogprobs, ...]
    """One entry per sampled token if the request asked, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Entries of the prompt positions this chunk scored, in order; empty if not asked."""
    complete: bool
    """The sampler says the text is complete: a grammar has reached its end."""
    error: str
    """Non-empty: this row failed and its request ends with the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens of one step, row by row in the plan's order."""

    seq: int
    rows: tuple[RowResult, ...]
