"""What crosses the boundary between a front end and an engine, as msgspec structs.

Both ways run over one pair of sockets (`transport.py`), or directly in process. Text never crosses:
ids go in and ids come out.
"""

from __future__ import annotations

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


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """News of one engine request after a step."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] = []
    prompt_logprobs: list[PositionLogprobs] = []
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


class StepUpdates(msgspec.Struct, frozen=True, kw_only=True, tag="updates"):
    """All news of one step, and the engine's numbers after it. Also sent, empty, as a heartbeat."""

    updates: list[RequestUpdate]
    stats: EngineStats


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
