"""Which parts of responses look alike on every generating route? Usage, prompt logprobs, the error body.

They are msgspec structs, which are quick to encode.
"""

from __future__ import annotations

import msgspec

from tokamak.core.generation import TokenLogprob, Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Tokens billed: the prompt once, and every choice's tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_body(prompts: list[Usage], completion_tokens: int) -> UsageBody:
    """The usage of a request with these prompts, each counted once."""
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(usage.cached_tokens for usage in prompts)),
    )


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at one place of the prompt; vLLM's form."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, keyed by token id; null for the first."""


def prompt_logprobs_body(
    positions: tuple[TokenLogprob | None, ...] | None,
) -> PromptLogprobs | None:
    """Prompt logprobs as vLLM writes them: the token itself and its alternatives, by id."""
    if positions is None:
        return None
    body: PromptLogprobs = []
    for position in positions:
        if position is None:
            body.append(None)
            continue
        entry = {
            str(other.token_id): PromptLogprob(finite(other.logprob), rank, other.token)
            for rank, other in enumerate(position.top, start=1)
        }
        chosen = position.chosen
        entry[str(chosen.token_id)] = PromptLogprob(
            finite(chosen.logprob), position.rank, chosen.token
        )
        body.append(entry)
    return body


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def finite(logprob: float) -> float:
    """The logprob, or the lowest one we write: a banned token's is minus infinity."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's words: `param` names the field, `code` the kind."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorDetail
