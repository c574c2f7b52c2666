"""What does a client see of one sibling's new token ids?

In: RequestUpdates, as ids. Out: GenerationEvents, with finished text, ids, logprobs and usage of the same cut.
Text waits while it may be half a character or the beginning of a stop string; ids wait with it, so that a client
gets no empty delta. A stop string ends the stream at the token that completed it; what came after is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokamak.core.generation import Alternative, GenerationEvent, Timings, TokenLogprob, Usage
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.messages import PositionLogprobs, RequestUpdate
from tokamak.errors import EngineError, OverloadedError, RequestError, StepError, TokamakError
from tokamak.text.detokenizer import Detokenizer
from tokamak.text.stop import StopStrings
from tokamak.text.tokenizer import Tokenizer


class OutputStream:
    """One sibling's updates as text events.

    Stop strings are looked for in the text of the tokens after the first `min_tokens` ones. A stop token
    (end-of-sequence included) is among the ids, and its text is left out unless
    `include_stop_str_in_output` asks for it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        arrived_s: float,
    ) -> None:
        """Start before the first token; `arrived_s` is the request's arrival on the monotonic clock."""
        self.sibling = sibling
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.ended_here = False
        """A stop string ended it before the engine did, so the engine must be told."""
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_ids = tuple(prompt_ids)
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=self._prompt_ids
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._tokens = 0
        self._cached_tokens = 0
        self._events = 0
        self._waiting_ids: list[int] = []
        self._waiting_logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._owes_prompt_logprobs = params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        """Whether the last event was made."""
        return self.finish_reason is not None

    def feed(self, update: RequestUpdate, now_s: float) -> GenerationEvent | None:
        """The event an update amounts to, or None while everything of it still waits.

        Updates after the end are ignored: a step may be in flight when a stop string ends the stream.

        Raises:
            RequestError, OverloadedError, EngineError: the update carries that error.
        """
        if self.finished:
            return None
        if update.finish_reason is FinishReason.ERROR:
            self.finish_reason = FinishReason.ERROR
            raise error_of(update)
        self._cached_tokens = max(self._cached_tokens, update.cached_tokens)
        if update.token_ids:
            self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
            self._last_token_s = now_s
        if self._owes_prompt_logprobs:
            self._prompt_logprobs += [self._logprob(entry) for entry in update.prompt_logprobs]
        text = self._take_tokens(update)
        if not self.finished and update.finish_reason is not None:
            text += self._end(update.finish_reason, update.stop_id)
        self.ended_here = self.finished and update.finish_reason is None
        complete = self._owes_prompt_logprobs and len(self._prompt_logprobs) >= len(
            self._prompt_ids
        )
        if not text and not self.finished and not complete:
            return None
        return self._event(text, with_prompt_logprobs=complete)

    def _take_tokens(self, update: RequestUpdate) -> str:
        """Take tokens one by one until a stop string is complete; returns the text they release."""
        asked = self._params.logprobs is not None
        released: list[str] = []
        for at, token_id in enumerate(update.token_ids):
            self._tokens += 1
            self._waiting_ids.append(token_id)
            if asked:
                self._waiting_logprobs.append(self._logprob(update.logprobs[at]))
            if token_id == update.stop_id and at == len(update.token_ids) - 1:
                if self._params.include_stop_str_in_output:
                    released.append(self._detokenizer.feed([token_id]))
                break
            text = self._detokenizer.feed([token_id])
            released.append(self._cut(text))
            if self._stops.matched is not None:
                self._stop_at_string()
                break
        return "".join(released)

    def _cut(self, text: str) -> str:
        """Pass text through the stop strings, once `min_tokens` tokens are there."""
        if not self._params.stop or self._tokens <= self._params.min_tokens:
            return text
        return self._stops.feed(text)

    def _end(self, reason: FinishReason, stop_id: int | None) -> str:
        """The engine ended it: returns the text that still waited."""
        text = self._cut(self._detokenizer.finish())
        if self._stops.matched is not None:
            self._stop_at_string()
            return text
        self.finish_reason = reason
        self.stop_reason = stop_id if stop_id in self._params.stop_token_ids else None
        return text + self._stops.finish()

    def _stop_at_string(self) -> None:
        self.finish_reason = FinishReason.STOP
        self.stop_reason = self._stops.matched

    def _event(self, text: str, *, with_prompt_logprobs: bool) -> GenerationEvent:
        first = self._events == 0
        self._events += 1
        event = GenerationEvent(
            sibling=self.sibling,
            text=text,
            token_ids=tuple(self._waiting_ids),
            logprobs=None if self._params.logprobs is None else tuple(self._waiting_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=Usage(
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=self._tokens,
                cached_tokens=self._cached_tokens,
            ),
            timings=Timings(
                arrived_s=self._arrived_s,
                first_token_s=self._first_token_s,
                last_token_s=self._last_token_s,
            ),
            prompt_ids=self._prompt_ids if first else (),
            prompt_logprobs=tuple(self._prompt_logprobs) if with_prompt_logprobs else None,
        )
        self._waiting_ids.clear()
        self._waiting_logprobs.clear()
        if with_prompt_logprobs:
            self._owes_prompt_logprobs = False
            self._prompt_logprobs = []
        return event

    def _logprob(self, entry: PositionLogprobs) -> TokenLogprob:
        named = [
            Alternative(
                token_id=token_id,
                token=self._tokenizer.token_text(token_id),
                token_bytes=self._tokenizer.token_bytes(token_id),
                logprob=logprob,
            )
            for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
        ]
        return TokenLogprob(chosen=named[0], rank=entry.rank, top=tuple(named[1:]))


def error_of(update: RequestUpdate) -> TokamakError:
    """The error an update carries, as the exception to raise for its client."""
    if update.error_kind == "request":
        return RequestError(update.error, field=update.error_field or None)
    if update.error_kind == "overloaded":
        return OverloadedError(update.error, retry_after_s=update.retry_after_s)
    if update.error_kind == "engine":
        return StepError(update.error)
    return EngineError(f"{update.error} (of the unknown kind {update.error_kind!r})")
