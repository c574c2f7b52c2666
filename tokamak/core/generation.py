"""What the front end asks an engine for, and the events it gets back, with text.

These stay in the front end's process; what crosses to the engine is in `engine/messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tokamak.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it. `params.n` siblings share the prompt."""

    request_id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own (BOS) to a text prompt; chat prompts say False."""
    priority: int = 0
    """Lower runs first, under the `priority` policy."""
    cache_salt: str = ""
    """Prefix blocks are shared only between requests with the same salt."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token and how likely it was."""

    token_id: int
    token: str
    token_bytes: bytes
    """The token's true bytes, also where they are only part of a character."""
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The token of one position, its rank (1 is most likely), and the most likely alternatives."""

    chosen: Alternative
    rank: int
    top: tuple[Alternative, ...]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens billed. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on the monotonic clock; None until it happened."""

    arrived_s: float
    first_token_s: float | None
    last_token_s: float | None


class GenerationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News of one sibling: new text with the token ids and logprobs that made it.

    Joined over a sibling's events, `text`, `token_ids` and `logprobs` describe the same cut. An event
    has text or a finish reason (or prompt logprobs), so clients see no empty deltas.
    """

    sibling: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token id if asked for, else None."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The client's stop string or stop token id that ended it; None for end of sequence."""
    usage: Usage
    timings: Timings
    prompt_ids: tuple[int, ...] = ()
    """The prompt's token ids, in a sibling's first event; empty later."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In the first event if asked for: one per prompt token, None for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What clients may know of a running engine."""

    served_names: tuple[str, ...]
    max_model_len: int
    vocab_tokens: int
    block_tokens: int
    total_blocks: int
    max_num_seqs: int
    started_unix_s: float
    choices: tuple[tuple[str, str, str], ...] = ()
    """Backend choices as (op, backend, why)."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of start-up."""
