"""What does a client send to /v1/completions, and what does it get back?"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from tokamak.core.generation import Alternative, TokenLogprob
from tokamak.core.request import SamplingParams
from tokamak.errors import RequestError
from tokamak.server.protocol.answers import PromptLogprobs, UsageBody, finite
from tokamak.server.protocol.common import Int64, Items
from tokamak.server.protocol.sampling import MAX_CHOICES, SamplingFields

DEFAULT_MAX_TOKENS = 16
"""OpenAI's: a completion without max_tokens is short."""


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    """A text, a text's token ids, or a list of either."""
    logprobs: Int64 | None = None
    """Alternatives per token; 0 is the token alone."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own tokens, such as BOS, to a text; on unless said otherwise."""
    best_of: Int64 | None = None
    suffix: Literal[""] | None = None

    def check(self) -> None:
        """Refuse what the types allow and this route does not."""
        self.check_stream()
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise RequestError(
                f"best_of is {self.best_of}, but this server ranks no candidates: best_of must equal n",
                field="best_of",
                hint="leave best_of out and choose among n choices yourself",
            )
        if self.echo and self.prompt_logprobs is not None and self.logprobs is not None:
            raise RequestError(
                f"prompt_logprobs is {self.prompt_logprobs}, but echo with logprobs asks for them already",
                field="prompt_logprobs",
            )

    def params(self) -> SamplingParams:
        """The engine's form of the sampling fields."""
        return self.sampling_params(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each a text or its ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise RequestError(
                "prompt is an empty list; it needs token ids or texts", field="prompt"
            )
        if isinstance(given[0], int):
            return [tuple(cast("list[int]", given))]
        choices = len(given) * max(self.n or 1, 1)
        if choices > MAX_CHOICES:
            raise RequestError(
                f"prompt holds {len(given)} prompts, {choices} choices in all; one request may ask"
                f" for {MAX_CHOICES}",
                field="prompt",
                hint="send several requests",
            )
        several = cast("list[str | list[int]]", given)
        return [one if isinstance(one, str) else tuple(one) for one in several]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    r"""Log-probabilities in parallel lists, one entry per token.

    Tokens that are only part of a character are written as `bytes:\xe4\xbd`. `text_offset` is the place
    of a token in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation, or in a stream its news."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class LogprobWriter:
    """Writes one choice's logprobs and keeps count of its text offsets across chunks."""

    def __init__(self, hidden_ids: frozenset[int]) -> None:
        """Start at the first character; `hidden_ids` are tokens that leave no text."""
        self._hidden_ids = hidden_ids
        self._offset = 0

    def write(self, tokens: tuple[TokenLogprob, ...]) -> CompletionLogprobs:
        """The entries of these tokens."""
        body = CompletionLogprobs([], [], [], [])
        for token in tokens:
            self._append(body, token.chosen, finite(token.chosen.logprob))
            body.top_logprobs.append(
                {written(other): finite(other.logprob) for other in (*token.top, token.chosen)}
            )
        return body

    def write_prompt(
        self, first: Alternative, positions: tuple[TokenLogprob | None, ...]
    ) -> CompletionLogprobs:
        """The entries of an echoed prompt: nothing predicts its first token."""
        body = CompletionLogprobs([], [], [], [])
        self._append(body, first, None)
        body.top_logprobs.append(None)
        rest = self.write(tuple(token for token in positions if token is not None))
        return joined(body, rest)

    def _append(self, body: CompletionLogprobs, token: Alternative, logprob: float | None) -> None:
        body.tokens.append(written(token))
        body.token_logprobs.append(logprob)
        body.text_offset.append(self._offset)
        if token.token_id not in self._hidden_ids:
            # A character counts where its first byte is: the others begin with the bits 10.
            self._offset += sum(1 for byte in token.token_bytes if byte & 0xC0 != 0x80)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of one after those of the other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def written(token: Alternative) -> str:
    """A token's text, or its bytes if they are only part of a character."""
    try:
        token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
    return token.token
