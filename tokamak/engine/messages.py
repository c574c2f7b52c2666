"""What crosses the boundary between a front end and an engine, as msgspec structs.

Both ways run over one pair of sockets (`transport.py`), or directly in process. Text never crosses:
ids go in and ids come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokamak.core.request import FinishReason, SamplingParams


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Run one sibling of a request. `max_tokens` is settled, `stop_ids` hold EOS and stop ids."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: list[int]
    sibling: int
    priority: int
    cache_salt: str


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests; unknown ids are ignored, no answer is sent."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Drop every reusable block that no request holds."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the engine now; unfinished requests end with `abort`."""


ToEngine = AddRequest | AbortRequests | ResetPrefixCache | Shutdown


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position: the token first, then the most likely ones; `rank` is the token's, 1 the most likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """News of one engine request after a step. In no cycle, like all that is made for every row."""

    request_id: str
    token_ids: list[int] = []
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    """Entries of prompt positions 1, 2, … in order, spread over the updates of the prefill."""
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The stop token id that ended it (it is the last of token_ids)."""
    cached_tokens: int = 0
    error: str = ""
    """With finish reason `error`: what happened."""
    error_kind: str = ""
    """`request` (the client's fault), `overloaded` or `engine`."""
    error_field: str = ""
    retry_after_s: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine; counters only grow."""

    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    running_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    host_waits: int = 0
    finished_requests: int = 0
    last_token_monotonic_s: float = 0.0
    step_seconds_sum: float = 0.0


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """One graph: what it may record, what it has recorded, and what that takes."""

    name: str
    kind: str
    """`request`, `token` or `decoder`."""
    backend: str
    ladder: list[int]
    """Its buckets: requests or token rows."""
    recorded: list[int]
    """Those that can be replayed."""
    seconds: float
    """Spent recording."""
    pool_bytes: int
    segments: int
    """Of all recorded buckets together."""
    state: str
    """`recorded` (every bucket), `partly recorded`, `empty`, or `off: ` and why."""
    recordings: int = 0
    """Recordings made so far."""
    replays: int = 0
    """Steps that were replayed."""


class VerdictReport(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket, at one size, compared with the eager forward before serving."""

    graph: str
    bucket: int
    size: int
    worst: float
    """The largest difference, relative to the largest number of its row."""
    ok: bool


class ModeNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one mode so far; running tokens beyond the scheduled ones are padding."""

    steps: int = 0
    scheduled_tokens: int = 0
    running_tokens: int = 0


class SpanNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step, over all steps so far, or one phase of a request, over all requests."""

    counts: list[int]
    """How often it took at most each bound (`BOUNDS_S`, `PHASE_BOUNDS_S`), then how often in all."""
    sum_s: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's steps went, and what its graphs are; sums since the start."""

    graphs_when: str = "off"
    """`startup`, `serving`, `on-demand` or `off`."""
    graphs_why: str = "the engine has not reported yet"
    graph_backend: str = "none"
    graph_reserve_bytes: int = 0
    """Set aside for recordings."""
    graph_cost: str = ""
    """Where the estimate came from: `measured`, `saved` or `default`."""
    graphs: list[GraphReport] = []
    verdicts: list[VerdictReport] = []
    """Of the verification at start; empty if none was asked for."""
    graph_checks: int = 0
    """Replayed steps that were compared with the eager forward while serving."""
    graph_check_failures: int = 0
    modes: dict[str, ModeNumbers] = {}
    late: ModeNumbers = ModeNumbers()
    """Steps whose late layers ran on their own, and the rows that these ran for."""
    reasons: dict[str, int] = {}
    """Steps by why they ran in their mode."""
    spans: dict[str, SpanNumbers] = {}
    phases: dict[str, SpanNumbers] = {}


class StepUpdates(msgspec.Struct, frozen=True, kw_only=True, tag="updates"):
    """All news of one step, and the engine's numbers after it. Also sent, empty, as a heartbeat."""

    updates: list[RequestUpdate]
    stats: EngineStats
    report: EngineReport | None = None
    """With the first news and then every half second; None between."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is loaded and serves."""

    max_model_len: int
    vocab_tokens: int
    block_tokens: int
    total_blocks: int
    choices: list[tuple[str, str, str]]
    load_s: dict[str, float]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine could not start, or died; `message` is one line with the reason and a hint."""

    message: str
    kind: str
    """The error class' name."""


FromEngine = StepUpdates | Ready | Failed
