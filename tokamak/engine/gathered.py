"""What is a request's whole output? Its events, gathered until the last of its continuations ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokamak.core.generation import (
    GenerationEvent,
    GenerationRequest,
    Timings,
    TokenLogprob,
    Usage,
)
from tokamak.core.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Which of the `n` it is."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations; the properties are those of the first."""

    prompt: str | None
    """The prompt's text, if it was given as text or messages."""
    prompt_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Logprobs of the first output, if asked for."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class _Sibling:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: GenerationEvent | None = None


class Gathered:
    """The events of one request on their way to its output."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._siblings = [_Sibling() for _ in range(request.params.n)]
        self._prompt_ids: tuple[int, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def take(self, event: GenerationEvent) -> None:
        """Add what came next of one continuation."""
        sibling = self._siblings[event.sibling]
        sibling.text.append(event.text)
        sibling.token_ids += event.token_ids
        sibling.logprobs += event.logprobs or ()
        sibling.last = event
        if event.sibling == 0:
            self._prompt_ids = event.prompt_ids or self._prompt_ids
            self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs

    def output(self) -> RequestOutput:
        """All of it, once every continuation has ended."""
        lasts = [sibling.last for sibling in self._siblings if sibling.last is not None]
        assert len(lasts) == len(self._siblings), "a sibling ended without an event"
        prompt, params = self._request.prompt, self._request.params
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=self._prompt_ids,
            outputs=tuple(
                CompletionOutput(
                    index=index,
                    text="".join(sibling.text),
                    token_ids=tuple(sibling.token_ids),
                    logprobs=None if params.logprobs is None else tuple(sibling.logprobs),
                    finish_reason=last.finish_reason or FinishReason.ABORT,
                    stop_reason=last.stop_reason,
                )
                for index, (sibling, last) in enumerate(zip(self._siblings, lasts, strict=True))
            ),
            prompt_logprobs=self._prompt_logprobs,
            usage=Usage(
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=sum(last.usage.completion_tokens for last in lasts),
                cached_tokens=lasts[0].usage.cached_tokens,
            ),
            timings=Timings(
                arrived_s=lasts[0].timings.arrived_s,
                first_token_s=_when(min, [last.timings.first_token_s for last in lasts]),
                last_token_s=_when(max, [last.timings.last_token_s for last in lasts]),
            ),
        )


def _when(choose: Callable[[list[float]], float], times: Sequence[float | None]) -> float | None:
    known = [at for at in times if at is not None]
    return choose(known) if known else None
